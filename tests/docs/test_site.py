"""The site's sources: pages that say what is, programs that run, nothing from a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import uhrc_core as uhrc
from uhrc_core import ComponentType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DRAWINGS = sorted((DOCS / "drawings").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def pages(entry: Any) -> list[str]:
    """The files that a part of the navigation leads to."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages(part)]


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_every_page_is_in_the_navigation_once(site: dict[str, Any]) -> None:
    assert sorted(pages(site["nav"])) == sorted(
        str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")
    )


def test_the_pages_code_that_builds_caches_runs() -> None:
    for name, sizes in (("index", [1]), ("embed", [1, 2, 2])):
        [block, *_] = re.findall(
            r"^```python\n(.*?)^```$", (DOCS / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL
        )
        names: dict[str, Any] = {}
        exec(compile(block, f"{name}.md", "exec"), names)
        caches = [each for each in names.values() if isinstance(each, uhrc.UnifiedRadixCache)]
        assert [len(cache.components) for cache in caches] == sizes
        assert all(cache.available_size(ComponentType.FULL) == 4096 for cache in caches)


def test_embed_shows_the_examples_that_are_tested_and_names_every_call() -> None:
    page = (DOCS / "embed.md").read_text()
    shown = re.findall(r'^--8<-- "examples/(\w+)\.py"$', page, re.MULTILINE)
    assert shown == ["embed_full", "embed_swa", "embed_recurrent"]
    cells = re.findall(r"^\| (`\w+`.*?) \|", page, re.MULTILINE)
    calls = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert all(hasattr(uhrc.BasePrefixCache, call) for call in calls)
    steps = {"match_req", "admit_req", "extend_req", "advance_req", "started_req", "prefetch_req"}
    ends = {"cache_unfinished_req", "cache_finished_req", "abort_req", "retract_req"}
    asked = {"cuts", "state_slots", "page_tables", "token_indices", "publishable_len"}
    assert calls == steps | ends | asked | {"request_state"}


@pytest.mark.parametrize("name", ["architecture", "semantics"])
def test_every_file_that_a_page_names_is_there(name: str) -> None:
    """A heading begins with a whole path; a bare name after a path is of the same folder."""
    for line in (DOCS / f"{name}.md").read_text().splitlines():
        paths = [Path(path) for path in re.findall(r"`([\w/]+\.py)`", line)]
        assert not line.startswith("#") or all("/" in str(path) for path in paths[:1]), line
        folder = Path()
        for path in paths:
            folder = path.parent if "/" in str(path) else folder
            assert folder == Path() or (ROOT / folder / path.name).exists(), line


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    named = set(re.findall(r"^::: uhrc_core\.(\w+)", text, re.MULTILINE))
    errors = {name for name in uhrc.__all__ if name.endswith("Error")}
    assert "errors" in named
    assert set(uhrc.__all__) - errors - named == {"UnifiedRadixCache"}


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_is_small_titled_shown_and_fits_a_phone(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert path.stat().st_size < 10_000
    assert root.findtext(f"{SVG}title")
    assert int(root.attrib["width"]) <= 490
    shown = re.compile(rf"!\[[^\]]{{40,}}\]\(drawings/{path.name}\)")
    assert any(shown.search(page.read_text()) for page in DOCS.glob("*.md"))


def test_no_source_asks_for_anything_from_the_network(site: dict[str, Any]) -> None:
    assert site["theme"]["font"] is False
    assert site["extra"]["polyfills"] == ["assets/iframe-worker.js"]
    for path in [*DRAWINGS, *(DOCS / "assets").iterdir()]:
        without_namespaces = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.", without_namespaces), path


@pytest.mark.slow
def test_the_built_pages_load_nothing_from_the_network(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).with_name("mkdocs")
    subprocess.run(
        [mkdocs, "build", "--quiet", "--strict", "--site-dir", tmp_path], cwd=ROOT, check=True
    )
    built = sorted(tmp_path.rglob("*.html"))
    assert len(built) > 20
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//")
    assert [str(path) for path in built if loads.search(path.read_text())] == []
    styles = "".join(path.read_text() for path in tmp_path.rglob("*.css"))
    assert not re.search(r"url\(\s*[\"']?(?:https?:)?//", styles)


@pytest.mark.parametrize(
    ("docstring", "read"),
    [
        ("Args:\n    start, stop: tokens.", "Args:\n    start,\N{NO-BREAK SPACE}stop: tokens."),
        ("Args:\n    start: tokens, all: of them.", "Args:\n    start: tokens, all: of them."),
        ("Returns:\n    A state, or none: no room.", "**Returns:**\n\nA state, or none: no room."),
    ],
)
def test_docstrings_are_rewritten_for_the_references_parser(docstring: str, read: str) -> None:
    sys.path.insert(0, str(DOCS))
    try:
        from docstrings import as_the_parser_reads
    finally:
        sys.path.remove(str(DOCS))
    assert as_the_parser_reads(docstring) == read
