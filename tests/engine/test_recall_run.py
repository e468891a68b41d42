"""The trained hybrid: a wrong state would give wrong answers, with and without the cache alike."""

from __future__ import annotations

from pathlib import Path

from uhrc_core.config.loading import load_config
from uhrc_engine.workload.compare import compare

CONFIGS = Path(__file__).parents[2] / "configs"


class Silent:
    def phase(self, name: str, total: int | None) -> None: ...

    def advance(self) -> None: ...


def test_answers_are_as_right_from_the_cache_as_without_it() -> None:
    config = load_config(CONFIGS / "recall.toml", ["workload.turns=12", "workload.documents=2"])
    comparison = compare(CONFIGS / "recall", config, Silent())
    none, cached = comparison.runs
    assert none.accuracy is not None and cached.accuracy is not None
    assert none.accuracy == cached.accuracy > 0.95
    assert not comparison.differing_turns
    # Each document is computed once; of every other prompt only the question is.
    assert cached.cached_tokens == 22 * 1024 and cached.cow_clones == 22
    assert none.cached_tokens == none.cow_clones == 0
