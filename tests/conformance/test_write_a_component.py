"""docs/write-a-component.md followed to the letter: files, commands, contracts, messages."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import uhrc_core.plugin_api as api
from tests.conformance.distributions import Site
from tests.conformance.test_component_kit import FAULTS
from uhrc_core.cli.app import make_app
from uhrc_core.testing import ComponentConformance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/write-a-component.md").read_text()
UHRC = Path(sys.executable).with_name("uhrc")

#: Each file of the page: its path alone on a line, then a fenced block.
FILES = dict(re.findall(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def rows(title: str) -> list[list[str]]:
    """The cells of the table whose first header is ``title``."""
    [table] = re.findall(rf"^\| {title} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def methods(contract: type) -> dict[str, str]:
    """Every public method that a class defines itself, as the page writes it: name and call."""
    found = {}
    for name, function in vars(contract).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            _, *arguments = inspect.signature(function).parameters
            found[name] = f"{name}({', '.join(arguments)})"
    return found


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The page's command has run, its files are written over, and the distribution is installed."""
    folder = tmp_path_factory.mktemp("page")
    [command] = re.findall(r"^uhrc (new-plugin .*)$", PAGE, re.MULTILINE)
    result = CliRunner().invoke(make_app(), [*command.split(), "--into", str(folder)])
    assert result.exit_code == 0, result.output
    for name, text in FILES.items():
        if name.startswith("slab/"):
            assert text == (folder / name).read_text(), f"{name} is not what the command writes"
        (folder / name).write_text(text)
    site = Site(folder / "site")
    site.install(folder / "slab")
    return site


def green(site: Site, folder: Path) -> None:
    """The kit and the distribution's one test of its own pass."""
    output = site.run(sys.executable, "-m", "pytest", "-q", "slab", cwd=folder)
    checks = sum(name.startswith("test_") for name in dir(ComponentConformance))
    assert re.search(rf"^{checks + 1} passed in ", output, re.MULTILINE), output


def test_every_module_is_on_the_page(followed: Site) -> None:
    folder = followed.folder.parent
    written = {str(path.relative_to(folder)) for path in (folder / "slab").rglob("*.py")}
    assert written - set(FILES) == {"slab/slab/__init__.py"}
    assert "slab/pyproject.toml" in FILES


def test_the_pages_component_passes_the_kit_and_is_listed(followed: Site) -> None:
    folder = followed.folder.parent
    green(followed, folder)
    assert "component slab" in followed.run(UHRC, "plugins", cwd=folder)


def test_the_pages_leaf_grows_and_passes_the_kit(followed: Site, tmp_path: Path) -> None:
    folder = followed.folder.parent
    shutil.copytree(folder / "slab", tmp_path / "slab")
    for name in ("grow.diff", "cache.toml", "try_it.py"):
        shutil.copy(folder / name, tmp_path)
    site = Site(tmp_path / "site")
    [command] = re.findall(r"`(git apply .*?)`", PAGE)
    site.run(*command.split(), cwd=tmp_path)
    site.install(tmp_path / "slab")
    green(site, tmp_path)
    assert followed.run(UHRC, "check", "cache.toml", cwd=folder).startswith("ok: ")
    shown = [each.run(sys.executable, "try_it.py", cwd=tmp_path) for each in (followed, site)]
    assert f"before the diff and after it:\n\n```\n{''.join(shown)}```" in PAGE


def test_both_contracts_are_on_the_page_whole_and_each_method_once() -> None:
    calls = rows("call")
    for title, contract, below in (
        ("for the tree", api.TreeComponent, True),
        ("for a request", api.Holding, False),
    ):
        asked = [quoted(row[0])[0] for row in rows(title)]
        mine = [quoted(row[0])[0] for row in calls if contract.__name__ in row[1]] * below
        [said] = re.findall(r"^The tree calls (.*?)They are written", PAGE, re.M | re.DOTALL)
        by_the_tree = re.findall(r"`(\w+\(\w*\))`", said) * below
        assert sorted([*asked, *mine, *by_the_tree]) == sorted(methods(contract).values())
        must = {quoted(row[0])[0].partition("(")[0] for row in rows(title) if row[1] == "must"}
        assert must == contract.__abstractmethods__


def test_what_a_token_holding_has_written_is_said() -> None:
    written = {quoted(row[0])[0].partition("(")[0]: row[2] for row in rows("for a request")}
    inherited = set(methods(api.TokenHolding)) & set(written)
    assert {name for name, cell in written.items() if cell == "written"} == inherited
    still = api.TokenHolding.__abstractmethods__
    assert {name for name, cell in written.items() if cell == "must"} == still


def test_the_calls_for_subclasses_are_there_as_they_are_written() -> None:
    named = [quoted(cell)[0] for row in rows("call") for cell in row[:2]]
    for call, owner in zip(named[::2], named[1::2], strict=True):
        name = call.partition("(")[0]
        assert methods(getattr(api, owner))[name] == call
    drawn = {name for row in rows("the engine calls") for cell in row[1:] for name in quoted(cell)}
    there = set(methods(api.TreeComponent)) | set(methods(api.Holding))
    assert drawn <= there
    steps = {name for row in rows("the engine calls") for name in quoted(row[0])}
    assert all(hasattr(api.UnifiedRadixCache, name) for name in steps)


def test_what_an_author_is_given_has_what_the_page_reads_of_it() -> None:
    for name, attributes in rows("object"):
        kind = getattr(api, quoted(name)[0])
        there = {*dir(kind), *getattr(kind, "__slots__", ())}
        read = {each.partition("(")[0] for each in quoted(attributes) if "." not in each}
        assert read <= there, name


def test_the_page_explains_every_message_of_the_kit_and_no_other() -> None:
    explained = {
        part: re.compile(re.sub(r"\d+", r"\\d+", re.escape(part)))
        for row in rows("the kit says")
        for part in quoted(row[0])
    }
    said = FAULTS.values()
    assert [part for part, each in explained.items() if not any(map(each.search, said))] == []
    assert [
        fault for fault in said if not any(each.search(fault) for each in explained.values())
    ] == []
