"""Finding plugins without importing them, and loading the ones that are needed.

`PluginCatalog` reads the entry points of the installed distributions: names, versions, targets. Its
`load` imports the modules that the given names stand for and returns a `Registry`, the typed view
of all they declare. pluggy is used inside `Registry` alone, never on the request path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from types import ModuleType

from uhrc_core.boundary import plugin_code
from uhrc_core.errors import PluginError
from uhrc_core.registry.hookspecs import UHRC_API
from uhrc_core.registry.registry import Registry

GROUP = "uhrc.plugins"
ENV_LIMIT = "UHRC_PLUGINS"

#: Which distribution brings a name that is not installed; for the error message only.
_KNOWN_DISTRIBUTIONS = {
    "full": "uhrc-full",
    "swa": "uhrc-swa",
    "recurrent": "uhrc-recurrent",
    "stub": "uhrc-hicache-stub",
    "engine": "uhrc-engine",
    "workload": "uhrc-engine",
}


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One entry point, as the distribution's metadata gives it."""

    name: str
    target: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.target})"


class PluginCatalog:
    """The installed plugins by name. Nothing is imported until `load`.

    Args:
        entries: all entry points of the group.
        limit: if given, only these names can be loaded (``UHRC_PLUGINS``).
    """

    def __init__(self, entries: Iterable[PluginEntry], limit: frozenset[str] | None = None) -> None:
        self.entries = tuple(sorted(entries, key=lambda e: (e.name, e.distribution)))
        self._limit = limit

    @property
    def names(self) -> tuple[str, ...]:
        """Names that can be loaded, sorted."""
        usable = {entry.name for entry in self.entries}
        return tuple(sorted(usable if self._limit is None else usable & self._limit))

    def _conflict(self, name: str) -> str | None:
        claims = [entry for entry in self.entries if entry.name == name]
        if len(claims) < 2:
            return None
        owners = " and ".join(map(str, claims))
        return (
            f"plugin name {name!r} is claimed by {owners}; uninstall one of them, or ask its "
            "author for another name"
        )

    def load(self, names: Iterable[str]) -> Registry:
        """Import the plugins of ``names`` and collect what they declare.

        Raises:
            PluginError: a name that is not installed, claimed twice, or whose plugin is broken.
        """
        registry, broken = self.load_each(names)
        if broken:
            raise join_faults(broken.values())
        return registry

    def load_each(self, names: Iterable[str]) -> tuple[Registry, dict[str, PluginError]]:
        """`load` what can be loaded; the other names with what is wrong with each."""
        registry = Registry()
        broken: dict[str, PluginError] = {}
        faults: dict[str, PluginError | None] = {}
        for name in sorted(names):
            try:
                entry = self._entry(name)
            except PluginError as error:
                broken[name] = error
                continue
            if str(entry) not in faults:
                faults[str(entry)] = self._register(registry, entry)
            if fault := faults[str(entry)]:
                broken[name] = fault
        return registry, broken

    def _register(self, registry: Registry, entry: PluginEntry) -> PluginError | None:
        """Register the module under all its names, or say what is wrong with it."""
        claimed = self.names_of(entry)
        plugin = f"plugin {', '.join(map(repr, claimed))} of {entry}"
        try:
            with plugin_code(f"{plugin} raised", passes=(PluginError,)):
                registry.register(str(entry), _import(entry, plugin), frozenset(claimed))
        except PluginError as error:
            return error
        return None

    def names_of(self, entry: PluginEntry) -> tuple[str, ...]:
        """All names under which its distribution registers the entry's module."""
        return tuple(
            other.name
            for other in self.entries
            if (other.distribution, other.target) == (entry.distribution, entry.target)
        )

    def _entry(self, name: str) -> PluginEntry:
        if name not in self.names:
            raise PluginError(self._missing(name))
        if message := self._conflict(name):
            raise PluginError(message)
        return next(entry for entry in self.entries if entry.name == name)

    def _missing(self, name: str) -> str:
        if any(entry.name == name for entry in self.entries):
            return f"plugin {name!r} is installed, but {ENV_LIMIT} leaves it out; add it there"
        message = f"plugin {name!r} is not installed"
        if distribution := _KNOWN_DISTRIBUTIONS.get(name):
            return message + _how_to_get(distribution, name)
        if close := get_close_matches(name, self.names, n=1):
            return f"{message}; did you mean {close[0]!r}?"
        installed = ", ".join(self.names) or "none"
        return (
            f"{message}; installed are: {installed}. Install the distribution that registers "
            f"{name!r} in the entry-point group {GROUP!r}"
        )


def join_faults(faults: Iterable[PluginError]) -> PluginError:
    """One error for one or several, a line each; its cause is the first one's."""
    faults = list(faults)
    if len(faults) == 1:
        return faults[0]
    joined = PluginError("\n".join(map(str, faults)))
    joined.__cause__ = faults[0]
    return joined


def installed_plugins(environ: Mapping[str, str] | None = None) -> PluginCatalog:
    """The catalog of this Python environment.

    ``UHRC_PLUGINS=a,b`` limits it to those names; unset or empty means all. ``environ`` is the
    process environment unless given.

    Raises:
        PluginError: ``UHRC_PLUGINS`` names a plugin that is not installed.
    """
    environ = os.environ if environ is None else environ
    entries = [_entry_of(point) for point in entry_points(group=GROUP)]
    limit = frozenset(environ.get(ENV_LIMIT, "").replace(",", " ").split())
    catalog = PluginCatalog(entries, limit or None)
    if unknown := sorted(limit - {entry.name for entry in entries}):
        installed = ", ".join(sorted({entry.name for entry in entries})) or "none"
        raise PluginError(
            f"{ENV_LIMIT} names {', '.join(map(repr, unknown))}, not installed; installed are: "
            f"{installed}. Correct or unset {ENV_LIMIT}"
        )
    return catalog


def _how_to_get(distribution: str, name: str) -> str:
    try:
        present = version(distribution)
    except PackageNotFoundError:
        return f"; run: pip install {distribution}"
    return (
        f"; {distribution} {present} is there, but {name!r} is not built in it: take {name!r} "
        "out of the config"
    )


def _entry_of(point: EntryPoint) -> PluginEntry:
    dist = point.dist
    assert dist is not None, point
    return PluginEntry(point.name, point.value, dist.name, dist.version)


def _import(entry: PluginEntry, plugin: str) -> ModuleType:
    advice = f". Upgrade or reinstall {entry.distribution}, or take it out of the config"
    with plugin_code(f"{plugin} does not import:", advice):
        module = import_module(entry.target)
    api = vars(module).get("UHRC_API")
    if not _compatible(api):
        raise PluginError(
            f"{plugin} declares UHRC_API = {api!r}, but this uhrc-core "
            f"speaks {UHRC_API}: install versions of {entry.distribution} and uhrc-core made for "
            "each other"
        )
    return module


def _compatible(api: object) -> bool:
    major, minor = UHRC_API
    return api in [(major, older) for older in range(minor + 1)]
