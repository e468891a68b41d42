"""docs/write-a-backend.md followed to the letter: its files, its commands, what they show."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conformance.distributions import Site
from tests.conformance.test_recurrent_kit import FAULTS
from uhrc_core.cli.app import make_app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/write-a-backend.md").read_text()
UHRC = Path(sys.executable).with_name("uhrc")

#: Each file of the page: its path alone on a line, then a fenced block.
FILES = dict(re.findall(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The page's command has run, its files are written over, and the distribution is installed."""
    folder = tmp_path_factory.mktemp("page")
    [command] = re.findall(r"^uhrc (new-plugin .*)$", PAGE, re.MULTILINE)
    result = CliRunner().invoke(make_app(), [*command.split(), "--into", str(folder)])
    assert result.exit_code == 0, result.output
    site = Site(folder / "site")
    for name, text in FILES.items():
        if name.startswith("leaky/"):
            assert text == (folder / name).read_text(), f"{name} is not what the command writes"
        (folder / name).write_text(text)
    site.install(folder / "leaky")
    return site


def test_the_whole_backend_with_its_tests_is_on_the_page_and_short(
    followed: Site,
) -> None:
    written = {
        str(path.relative_to(followed.folder.parent)): path.read_text().count("\n")
        for path in (followed.folder.parent / "leaky").rglob("*.py")
    }
    assert sum(written.values()) < 110
    assert {name for name, lines in written.items() if lines > 1} == {
        name for name in FILES if name.endswith(".py")
    }


def test_the_pages_backend_passes_the_kit(followed: Site) -> None:
    folder = followed.folder.parent
    output = followed.run(sys.executable, "-m", "pytest", "-q", "leaky", cwd=folder)
    assert re.search(r"^\d+ passed in ", output, re.MULTILINE), output


def test_the_pages_convolution_applies_and_passes_the_kit(followed: Site, tmp_path: Path) -> None:
    folder = followed.folder.parent
    shutil.copytree(folder / "leaky", tmp_path / "leaky")
    site = Site(tmp_path / "site")
    shutil.copy(folder / "conv.diff", tmp_path)
    [command] = re.findall(r"`(git apply .*?)`", PAGE)
    site.run(*command.split(), cwd=tmp_path)
    site.install(tmp_path / "leaky")
    output = site.run(sys.executable, "-m", "pytest", "-q", "leaky", cwd=tmp_path)
    assert re.search(r"^\d+ passed in ", output, re.MULTILINE), output
    asked = "from leaky.backend import *; print(state_layout(LeakyParams(**SIZES)).convs[0].shape)"
    sizes = "SIZES = {'num_heads': 2, 'head_dim': 4, 'conv_kernel': 4}; "
    assert site.run(sys.executable, "-c", sizes + asked, cwd=tmp_path) == "(3, 8)\n"


def test_the_page_installs_what_a_checkout_has() -> None:
    [line] = re.findall(r"^pip install -e '.*cli.*$", PAGE, re.MULTILINE)
    folders = re.findall(r"-e '?([\w./]+)", line)
    assert folders == [".", "plugins/full", "plugins/recurrent"]
    assert all((ROOT / each / "pyproject.toml").exists() for each in folders)


def test_the_pages_config_is_described_as_the_page_says(followed: Site) -> None:
    folder = followed.folder.parent
    assert followed.run(UHRC, "check", "cache.toml", cwd=folder).startswith("ok: ")
    [shown] = re.findall(r"^recurrent: .*$", PAGE, re.MULTILINE)
    assert shown in followed.run(UHRC, "describe", "cache.toml", cwd=folder).splitlines()


def test_the_messages_that_the_page_explains_are_the_kits() -> None:
    explained = re.findall(r"^\| (`.*?)\s*\|", PAGE, re.MULTILINE)
    parts = [part for cell in explained for part in re.findall(r"`([^`]+)`", cell)]
    assert len(parts) >= 12
    for part in parts:
        pieces = [re.sub(r"\d+", r"\\d+", re.escape(piece)) for piece in part.split("...")]
        pattern = r"[\s\S]*".join(pieces)
        assert any(re.search(pattern, message) for message in FAULTS.values()), part
