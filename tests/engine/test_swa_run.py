"""The window model of configs/swa.toml: what `uhrc run` does with it, on fewer conversations."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from uhrc_core.config.loading import load_config
from uhrc_engine.workload.compare import compare

CONFIGS = Path(__file__).parents[2] / "configs"
OVERRIDES = ["workload.documents=1", "components.swa.num_tokens=1536"]


class Silent:
    def phase(self, name: str, total: int | None) -> None: ...

    def advance(self) -> None: ...


def test_conversations_beyond_the_window_hit_fully_and_say_the_same() -> None:
    config = load_config(CONFIGS / "swa.toml", OVERRIDES)
    comparison = compare(CONFIGS / "swa", config, Silent())
    assert not comparison.differing_turns
    none, cached = comparison.talks
    assert all(turn.cached_tokens == 0 for turn in none.turns)
    for before, turn in pairwise(cached.turns):
        if turn.number > 0:
            computed = before.prompt_tokens + len(before.token_ids) - 1
            assert turn.cached_tokens == computed // 64 * 64
    assert cached.turns[-1].prompt_tokens > 8 * 128
    # One conversation: with no cache a request alone, otherwise the tree's windows beside it.
    without, run = comparison.runs
    assert 128 < without.window_tokens_peak <= 128 + 256 + 2 * 64
    assert without.window_tokens_peak < run.window_tokens_peak <= 1536
    assert without.window_evicted_tokens == 0 < run.window_evicted_tokens
