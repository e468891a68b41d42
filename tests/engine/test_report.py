"""Figures of a run, and the comparison of runs."""

from __future__ import annotations

import json
from dataclasses import replace

from rich.console import Console

from uhrc_core.cache.params import CacheStats, EvictResult
from uhrc_engine import EngineStats
from uhrc_engine.report.summary import Comparison, percentile, summarize
from uhrc_engine.report.table import comparison_table
from uhrc_engine.workload.drive import Talks, Turn

STATS = EngineStats(
    prefill_steps=4,
    decode_steps=9,
    computed_tokens=300,
    output_tokens=6,
    cow_clones=5,
    slots_peak=7,
    window_tokens_peak=96,
    retractions=2,
    running=0,
    waiting=0,
    compiled_programs=3,
    cache=CacheStats(evicted=EvictResult(64, 1600), inserted_num_snapshots=3),
)


def turn(
    number: int, cached: int, answer: tuple[int, ...] = (1, 2, 3), right: bool | None = None
) -> Turn:
    return Turn(0, number, 200, cached, answer, "text", right, ttft_s=0.5 + number, latency_s=2.0)


def test_a_summary_adds_up_the_turns() -> None:
    run = summarize("m", "radix", Talks((turn(0, 0), turn(1, 160)), wall_s=4.0), STATS)
    assert (run.prompt_tokens, run.cached_tokens, run.output_tokens) == (400, 160, 6)
    assert run.hit_rate == 0.4
    assert (run.output_tokens_per_s, run.total_tokens_per_s) == (1.5, 101.5)
    assert (run.ttft_p50_s, run.ttft_p99_s) == (0.5, 1.5)
    assert (run.evicted_tokens, run.retractions) == (64, 2)


def test_states_and_right_answers_are_reported_where_there_are_any() -> None:
    talks = Talks((turn(0, 0, right=True), turn(1, 0, right=False)), wall_s=4.0)
    run = summarize("m", "radix", talks, STATS)
    assert (run.snapshots, run.cow_clones, run.slots_peak, run.accuracy) == (3, 5, 7, 0.5)
    printed = _printed(Comparison((run, run), (talks, talks), [["a", "b"]]))
    for line in ("snapshots taken", "states cloned", "slots at the peak", "50.0%"):
        assert line in printed
    plain = replace(STATS, slots_peak=0)
    run = summarize("m", "radix", Talks((turn(0, 0),), wall_s=4.0), plain)
    printed = _printed(Comparison((run,), (Talks((turn(0, 0),), 4.0),), [["a"]]))
    assert run.accuracy is None and "states" not in printed and "right answers" not in printed


def test_the_window_pool_is_reported_where_there_is_one() -> None:
    talks = Talks((turn(0, 0),), wall_s=4.0)
    run = summarize("m", "radix", talks, STATS)
    assert (run.window_evicted_tokens, run.window_tokens_peak) == (1600, 96)
    printed = _printed(Comparison((run,), (talks,), [["a"]]))
    for name, figure in (("window tokens evicted", "1,600"), ("window pool, at most", "96")):
        [line] = [line for line in printed.splitlines() if name in line]
        assert figure in line
    plain = summarize("m", "radix", talks, replace(STATS, window_tokens_peak=0))
    assert "window" not in _printed(Comparison((plain,), (talks,), [["a"]]))


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([5.0], 50) == 5.0
    assert percentile(list(range(1, 201)), 99) == 198


def _comparison(second_answer: tuple[int, ...]) -> Comparison:
    talks = (
        Talks((turn(0, 0), turn(1, 0)), 8.0),
        Talks((turn(0, 0), turn(1, 160, second_answer)), 4.0),
    )
    runs = tuple(summarize("m", name, t, STATS) for name, t in zip("ab", talks, strict=True))
    return Comparison(runs, talks, [["first", "second"]])


def _printed(comparison: Comparison) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(comparison_table(comparison))
    return capture.get()


def test_equal_answers_are_reported_as_identical() -> None:
    comparison = _comparison((1, 2, 3))
    assert comparison.differing_turns == ()
    assert comparison.to_json()["identical_outputs"] is True
    assert "yes" in _printed(comparison)


def test_a_different_answer_is_named() -> None:
    comparison = _comparison((1, 2, 4))
    assert comparison.differing_turns == ((0, 1),)
    assert "NO" in _printed(comparison)
    written = json.loads(json.dumps(comparison.to_json()))
    assert written["identical_outputs"] is False
    assert written["differing_turns"] == [[0, 1]]
    assert written["runs"][1]["hit_rate"] == 0.4
    assert written["runs"][1]["turns"][1]["token_ids"] == [1, 2, 4]
