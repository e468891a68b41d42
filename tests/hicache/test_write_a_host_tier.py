"""docs/write-a-host-tier.md followed to the letter: files, commands, records, messages."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conformance.distributions import Site
from tests.hicache.test_kit import EVICTED, FAULTS, WITH_STATES, StatelessTier, message_of
from uhrc_core.cache.host_tier import HiCacheHooks
from uhrc_core.cli.app import make_app
from uhrc_hicache_stub.hooks import RecordingHooks

PAGE = (Path(__file__).parents[2] / "docs/write-a-host-tier.md").read_text()
UHRC = Path(sys.executable).with_name("uhrc")

#: Each file of the page: its path alone on a line, then a fenced block.
FILES = dict(re.findall(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def rows(title: str) -> list[list[str]]:
    """The cells of the table whose first header is ``title``."""
    [table] = re.findall(rf"^\| {title} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The page's command has run, its other files are written, and the distribution installed."""
    folder = tmp_path_factory.mktemp("page")
    [command] = re.findall(r"^uhrc (new-plugin .*)$", PAGE, re.MULTILINE)
    result = CliRunner().invoke(make_app(), [*command.split(), "--into", str(folder)])
    assert result.exit_code == 0, result.output
    written = {
        str(path.relative_to(folder)): path.read_text() for path in folder.glob("attic/*/*.py")
    }
    assert {name for name, text in written.items() if text.count("\n") > 1} <= set(FILES)
    for name, text in FILES.items():
        assert written.get(name, text) == text, f"{name} is not what the command writes"
        (folder / name).write_text(text)
    site = Site(folder / "site")
    site.install(folder / "attic")
    return site


def test_a_tier_that_keeps_full_alone_passes_what_the_page_says(followed: Site) -> None:
    """The tests that the command writes are run with those of every kind of plugin."""
    folder = followed.folder.parent
    own = "attic/tests/test_kv_alone.py"
    output = followed.run(sys.executable, "-m", "pytest", "-q", own, cwd=folder)
    assert re.search(r"^\d+ passed in ", output, re.MULTILINE), output


def test_the_entry_point_is_what_the_page_says(followed: Site) -> None:
    [entry] = re.findall(r"^names it: `(.*)`, of the group `uhrc.plugins`", PAGE, re.MULTILINE)
    project = (followed.folder.parent / "attic/pyproject.toml").read_text()
    assert f'[project.entry-points."uhrc.plugins"]\n{entry}\n' in project


def test_data_goes_to_the_host_and_back_as_the_page_shows(followed: Site) -> None:
    folder = followed.folder.parent
    assert followed.run(UHRC, "check", "cache.toml", cwd=folder).startswith("ok: ")
    [shown] = re.findall(r"Before and after:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert followed.run(sys.executable, "try_it.py", cwd=folder) == shown


def test_the_hooks_are_those_of_the_page() -> None:
    written = [re.match(r"`(\w+)\((\w*)\)", row[0]) for row in rows("hook")]
    hooks = {found[1]: found[2] for found in written if found}
    assert set(hooks) == HiCacheHooks.__abstractmethods__
    for name, argument in hooks.items():
        _, *arguments = inspect.signature(getattr(HiCacheHooks, name)).parameters
        assert arguments == [argument] * bool(argument)


def test_the_records_are_those_of_the_page() -> None:
    for name, module, fields, also in rows("record"):
        [name], [module] = quoted(name), quoted(module)
        record = getattr(import_module(module), name)
        if quoted(fields):
            assert quoted(fields) == list(inspect.signature(record).parameters), name
        for attribute in re.findall(r"`\.(\w+)`", also):
            assert hasattr(record, attribute), f"{name}.{attribute}"


def test_the_page_explains_every_message_of_the_kit_and_no_other() -> None:
    said = [message_of(check, tier) for tier, (check, _) in FAULTS.items()]
    said.append(message_of(EVICTED, lambda context: RecordingHooks()))
    said.append(message_of("test_a_snapshot_comes_back_alone", StatelessTier, WITH_STATES))
    explained = [
        re.compile(re.sub(r"\d+", r"\\d+", re.escape(part)))
        for row in rows("the kit says")
        for part in quoted(row[0])
    ]
    assert [part for part in explained if not any(map(part.search, said))] == []
    assert [each for each in said if not any(part.search(each) for part in explained)] == []
