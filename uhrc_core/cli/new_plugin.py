"""``uhrc new-plugin``: a distribution of one's own that works and is tested before it is changed.

A kind is a folder of ``uhrc_core/templates``. Its files end in ``.tmpl`` and are filled in as
`string.Template`; in their paths, MODULE stands for the package's name and TEST for ``test`` (so
that nothing takes a template for a test).
"""

from __future__ import annotations

import keyword
import re
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from uhrc_core.cli.options import fail
from uhrc_core.errors import ConfigError, PluginError
from uhrc_core.registry.catalog import installed_plugins
from uhrc_core.registry.hookspecs import UHRC_API
from uhrc_core.registry.policies import BUILTIN_POLICIES

_TEMPLATES = files("uhrc_core") / "templates"
_SUFFIX = ".tmpl"
#: A distribution's name as PEP 508 has it.
_NAME = re.compile(r"[A-Z0-9]([A-Z0-9._-]*[A-Z0-9])?", re.IGNORECASE)


def kinds() -> list[str]:
    """What can be made, sorted."""
    return sorted(folder.name for folder in _TEMPLATES.iterdir() if folder.is_dir())


def new_plugin(
    name: Annotated[
        str, typer.Argument(help="Of the distribution; of uhrc-mine, the plugin is mine.")
    ],
    kind: Annotated[str, typer.Option(help=f"What it brings: {', '.join(kinds())}.")],
    into: Annotated[Path, typer.Option(help="Where to make its folder.")] = Path(),
) -> None:
    """Write a plugin that works: pyproject, module, implementation, and tests that pass."""
    try:
        folder = write_plugin(name, kind, into)
    except (ConfigError, PluginError) as error:
        fail(error)
    typer.echo(f"{folder}: a {kind} plugin, in a config {_plugin_of(folder.name)!r}; next:")
    typer.echo(f"  pip install -e '{folder}[test]' && python -m pytest {folder}")
    typer.echo("  uhrc plugins")


def write_plugin(name: str, kind: str, into: Path) -> Path:
    """Write the distribution ``name`` to a new folder of ``into``; returns the folder.

    Raises:
        ConfigError: a name that is none or is taken, an unknown kind, or a folder that is there
            already. Nothing is written then.
    """
    if kind not in kinds():
        raise ConfigError(f"--kind {kind}: must be one of {', '.join(kinds())}")
    fields = _fields(name)
    folder = into / fields["distribution"]
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; give another name, or --into elsewhere")
    texts = {
        path: Template(source.read_text(encoding="utf-8")).substitute(fields)
        for path, source in _files(_TEMPLATES / kind, Path())
    }
    try:
        for path, text in texts.items():
            target = folder / _filled(path, fields["module"])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error}") from error
    return folder


def _fields(name: str) -> dict[str, str]:
    """What templates may name, from a distribution's name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"NAME {name!r}: must be letters, digits, '-', '_' and '.', with a letter or digit at "
            "both ends"
        )
    distribution = re.sub(r"[-_.]+", "-", name).lower()  # PEP 503
    module = distribution.replace("-", "_")
    plugin = _plugin_of(distribution)
    for fault in (*map(_fault_of_word, (module, plugin)), _claim_of(plugin)):
        if fault:
            raise ConfigError(f"NAME {name!r}: {fault}")
    if find_spec(module) is not None:
        raise ConfigError(f"NAME {name!r}: a package {module!r} is installed already")
    major, minor, *_ = version("uhrc-core").split(".")
    return {
        "distribution": distribution,
        "module": module,
        "name": plugin,
        "class_name": plugin.title().replace("_", ""),
        "api": repr(UHRC_API),
        "core": f"uhrc-core>={major}.{minor},<{major}.{int(minor) + 1}",
    }


def _plugin_of(distribution: str) -> str:
    """What a config calls the plugin: ``uhrc-mine`` brings ``mine``."""
    return distribution.replace("-", "_").removeprefix("uhrc_")


def _fault_of_word(word: str) -> str | None:
    """Why neither a package nor a class can be called so, if it cannot."""
    if keyword.iskeyword(word):
        return f"{word!r} is a keyword of Python, which no package can be called"
    if not word.isidentifier():
        return f"{word!r} would be no Python identifier"
    return None


def _claim_of(plugin: str) -> str | None:
    """Who has the name of this plugin already, if anybody."""
    if plugin == "uhrc":
        return f"{plugin!r} is the project itself; say what the plugin is, such as uhrc-mine"
    owners = {spec.name: "uhrc-core" for spec in BUILTIN_POLICIES}
    owners |= {entry.name: entry.distribution for entry in installed_plugins({}).entries}
    if plugin in owners:
        return f"{plugin!r} is the name of a plugin already, of the distribution {owners[plugin]}"
    return None


def _files(folder: Traversable, at: Path) -> list[tuple[Path, Traversable]]:
    """Every template under ``folder`` with its path there, sorted."""
    found: list[tuple[Path, Traversable]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, at / entry.name)
        elif entry.name.endswith(_SUFFIX):
            found.append((at / entry.name, entry))
    return sorted(found, key=lambda each: each[0])


def _filled(path: Path, module: str) -> Path:
    text = path.as_posix().removesuffix(_SUFFIX)
    return Path(text.replace("MODULE", module).replace("TEST", "test"))
