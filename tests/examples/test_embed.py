"""The examples that embed the cache: each is short, and checks every answer itself."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("embed_full", "embed_swa", "embed_recurrent")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_its_answers_are_those_without_a_cache(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    cache = names["cache"]
    cache.check_invariants()
    assert cache.live_requests() == ()
    assert all(cache.protected_size(each.kind) == 0 for each in cache.components)
    said = sorted(capsys.readouterr().out.splitlines())
    hits = [line.split(": ")[1] for line in said]
    assert hits == [f"{n} of 51 prompt tokens came from the cache" for n in (0, 48, 48, 48)]


def test_the_examples_import_the_public_names_alone() -> None:
    for name in NAMES:
        lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
        imported = [line for line in lines if "uhrc_core" in line and "import" in line]
        assert len(imported) == 1
        assert imported[0] in ("import uhrc_core as uhrc", "from uhrc_core import build_kv_cache")
