"""``uhrc new-plugin``: each kind works as it is written, and a name that cannot be is refused."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.conformance.distributions import Site
from uhrc_core.cli.app import make_app
from uhrc_core.cli.new_plugin import kinds
from uhrc_core.testing import (
    ComponentConformance,
    HiCacheConformance,
    HostTierConformance,
    RecurrentBackendConformance,
)
from uhrc_core.testing import __all__ as KIT

ROOT = Path(__file__).parents[2]
UHRC = Path(sys.executable).with_name("uhrc")
BRINGS = {
    "component": "component mine",
    "hicache": "host tier mine",
    "policy": "policy mine",
    "recurrent": "backend mine",
}
#: The suites of the kit that its tests run, and how many tests they add.
TESTS: dict[str, tuple[tuple[type, ...], int]] = {
    "component": ((ComponentConformance,), 1),
    "hicache": ((HostTierConformance, HiCacheConformance), 2),
    "policy": ((ComponentConformance,), 1),
    "recurrent": ((RecurrentBackendConformance,), 0),
}


def uhrc(*arguments: object) -> Result:
    return CliRunner().invoke(make_app(), ["new-plugin", *(str(each) for each in arguments)])


def test_every_kind_has_its_templates_and_is_tested_here() -> None:
    assert kinds() == sorted(BRINGS)


@pytest.mark.parametrize("kind", BRINGS)
def test_what_is_written_installs_is_listed_and_passes_its_own_tests(
    kind: str, tmp_path: Path
) -> None:
    result = uhrc("UHRC_Mine", "--kind", kind, "--into", tmp_path)
    assert result.exit_code == 0, result.output
    project = tmp_path / "uhrc-mine"
    assert result.stdout.splitlines()[0] == f"{project}: a {kind} plugin, in a config 'mine'; next:"
    site = Site(tmp_path / "site")
    site.install(project)
    rows = json.loads(site.run(UHRC, "plugins", "--json", cwd=tmp_path))
    [mine] = [row for row in rows if row["distribution"] == "uhrc-mine"]
    assert (mine["names"], mine["brings"], mine["problem"]) == (["mine"], [BRINGS[kind]], None)
    tests = site.run(sys.executable, "-m", "pytest", "-q", project / "tests", cwd=tmp_path)
    suites, more = TESTS[kind]
    checks = sum(name.startswith("test_") for suite in suites for name in dir(suite))
    assert re.search(rf"^{checks + more} passed in ", tests, re.MULTILINE), tests


@pytest.mark.parametrize("kind", BRINGS)
def test_what_is_written_is_formatted_and_complete(kind: str, tmp_path: Path) -> None:
    uhrc("uhrc.long_names", "--kind", kind, "--into", tmp_path)
    project = tmp_path / "uhrc-long-names"
    options = ("--isolated", "--no-cache", "--line-length", "100")
    ruff = (sys.executable, "-m", "ruff")
    site = Site(tmp_path / "site")
    rules = ("--select", "E,F,I,UP,B,SIM,RUF")
    site.run(*ruff, "check", *options, *rules, project, cwd=project)
    site.run(*ruff, "format", "--check", *options, project, cwd=project)
    for file in project.rglob("*.*"):
        text = "" if file.is_dir() else file.read_text()
        assert "$" not in text and "MODULE" not in str(file), file
    table = tomllib.loads((project / "pyproject.toml").read_text())
    assert table["project"]["name"] == "uhrc-long-names"
    points = table["project"]["entry-points"]["uhrc.plugins"]
    assert points == {"long_names": "uhrc_long_names.plugin"}
    assert "uhrc-core>=0.1,<0.2" in table["project"]["dependencies"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("-mine", "must be letters, digits, '-', '_' and '.'"),
        ("mine!", "must be letters, digits, '-', '_' and '.'"),
        ("../mine", "must be letters, digits, '-', '_' and '.'"),
        ("3d", "'3d' would be no Python identifier"),
        ("class", "'class' is a keyword of Python"),
        ("uhrc-import", "'import' is a keyword of Python"),
        ("uhrc", "'uhrc' is the project itself; say what the plugin is, such as uhrc-mine"),
        ("uhrc-uhrc", "'uhrc' is the project itself"),
        ("KDA", "'kda' is the name of a plugin already, of the distribution uhrc-recurrent"),
        ("uhrc.full", "'full' is the name of a plugin already, of the distribution uhrc-full"),
        ("lru", "'lru' is the name of a plugin already, of the distribution uhrc-core"),
        ("numpy", "a package 'numpy' is installed already"),
        ("json", "a package 'json' is installed already"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, message: str, tmp_path: Path) -> None:
    result = uhrc("--kind", "policy", "--into", tmp_path, "--", name)
    assert result.exit_code == 1
    assert message in result.stderr and repr(name) in result.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_is_refused_with_those_there_are(tmp_path: Path) -> None:
    result = uhrc("mine", "--kind", "cash", "--into", tmp_path)
    assert result.exit_code == 1
    there = "component, hicache, policy, recurrent"
    assert result.stderr == f"error: --kind cash: must be one of {there}\n"


def test_the_page_for_authors_names_every_kind_and_all_of_the_kit() -> None:
    page = (ROOT / "docs/plugins.md").read_text()
    rows = [f"\n| `{kind}` | " for kind in kinds()]
    assert [each for each in (*rows, *(f"`{name}`" for name in KIT)) if each not in page] == []


def test_the_core_wheel_carries_the_templates(tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    site.install(ROOT)
    [shipped, source] = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.tmpl")}
        for root in (site.folder / "uhrc_core/templates", ROOT / "uhrc_core/templates")
    ]
    assert shipped == source and len(source) >= 3 * len(BRINGS)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "work.txt").write_text("of years")
    result = uhrc("Mine", "--kind", "policy", "--into", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {folder}: exists already")
    assert [file.name for file in folder.iterdir()] == ["work.txt"]
    target = tmp_path / "file"
    target.write_text("")
    result = uhrc("mine", "--kind", "policy", "--into", target)
    assert result.exit_code == 1 and "cannot be written" in result.stderr
