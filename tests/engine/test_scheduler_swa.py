"""The scheduler with window layers: each place remembers the sequence up to its token, and a window
must find its own there."""

from __future__ import annotations

import random

import pytest

from tests.engine.scheduler_sim import Sim, expected_output, play_random_traffic, prompt
from uhrc_core.baseline import ChunkCache
from uhrc_core.errors import RequestTooLargeError
from uhrc_core.kinds import ComponentType
from uhrc_swa.window import WindowPlan

SWA = ComponentType.SWA
PAGE, CHUNK = 4, 8


def windowed(window: int = 6, *, chunk_size: int = CHUNK, **fields: object) -> Sim:
    plan = WindowPlan(window, chunk_size, PAGE)
    return Sim(page_size=PAGE, window=plan, chunk_size=chunk_size, **fields)  # type: ignore[arg-type]


def least(window: int, chunk_size: int = CHUNK) -> int:
    """Tokens of the smallest pool: what one request may need."""
    return WindowPlan(window, chunk_size, PAGE).request_tokens


def nobody_holds(sim: Sim) -> int:
    return sim.cache.available_size(SWA) + sim.cache.evictable_size(SWA)


def serve(sim: Sim, rid: str, tokens: list[int], count: int = 3) -> int:
    """How much of the prompt was cached."""
    sim.add(rid, tokens, count)
    sim.run()
    assert sim.output(rid) == expected_output(tokens, count)
    return sim.done[rid].cached_tokens or 0


def test_rows_say_where_the_window_is_and_nothing_before_it() -> None:
    sim = windowed(window=6)
    serve(sim, "a", prompt(33), 10)
    for batch in sim.batches:
        [row] = batch.rows
        pages = row.page_tables[SWA]
        gone = int((pages < 0).sum())
        assert (pages[:gone] < 0).all() and (pages[gone:] >= 0).all()
        # The window of the row's first token and one page are kept, in whole pages.
        assert gone == max(row.start - 6 - PAGE, 0) // PAGE


@pytest.mark.parametrize("window", [1, 4, 6, 8, 30])
def test_the_next_turn_hits_all_that_was_computed(window: int) -> None:
    """On a pool that holds a fraction of the conversation, when that is long."""
    sim = windowed(window, num_window_tokens=least(window) + PAGE, num_tokens=512)
    talk = prompt(20)
    hits: list[int] = []
    expected: list[int] = [0]
    for turn in range(12):
        hits.append(serve(sim, f"turn {turn}", talk, 9))
        talk = talk + sim.output(f"turn {turn}") + prompt(5, seed=turn)
        expected.append((len(talk) - 5 - 1) // PAGE * PAGE)
    assert hits == expected[:-1]
    assert sim.scheduler.num_retractions == 0


@pytest.mark.parametrize("beyond_least", [0, 1, 4])
@pytest.mark.parametrize("window", [1, 6, 12])
def test_a_short_pool_changes_no_output_and_nothing_waits_for_ever(
    window: int, beyond_least: int
) -> None:
    size = least(window) + beyond_least * PAGE
    sim = windowed(window, num_window_tokens=size, prefill_rows=2)
    stem = prompt(24)
    asked = {f"r{i}": stem[: 8 * (i % 4)] + prompt(5 + i, seed=i % 4) for i in range(10)}
    for rid, tokens in asked.items():
        sim.add(rid, tokens, 30)
    sim.run()
    assert all(sim.output(rid) == expected_output(tokens, 30) for rid, tokens in asked.items())
    assert nobody_holds(sim) == size and sim.cache.num_receipts() == 0


def test_retraction_for_want_of_window_pages_changes_no_output() -> None:
    sim = windowed(12, num_window_tokens=least(12), headroom_tokens=1)
    for i in range(4):
        sim.add(f"r{i}", prompt(3, seed=i), 40)
    sim.run()
    assert sim.scheduler.num_retractions > 0
    for i in range(4):
        assert sim.output(f"r{i}") == expected_output(prompt(3, seed=i), 40)
    assert nobody_holds(sim) == least(12)


def test_a_request_whose_windows_exceed_the_pool_is_refused() -> None:
    sim = windowed(12, num_window_tokens=least(12) - PAGE)
    with pytest.raises(RequestTooLargeError, match=f"needs {least(12)} SWA units, the pool has"):
        sim.add("a", prompt(200), 1)
    assert not sim.scheduler.has_work
    assert serve(sim, "short", prompt(9), 3) == 0


@pytest.mark.parametrize("window", [1, 6, 30])
def test_without_reuse_windows_give_the_same_text(window: int) -> None:
    size = least(window)
    sim = windowed(window, num_window_tokens=size, cache_class=ChunkCache, prefill_rows=2)
    play_random_traffic(sim, random.Random(window), f"window {window}")
    assert sim.cache.available_size(SWA) == size
    assert all(not req.cached_tokens for req in sim.done.values())


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_gives_every_request_its_own_text(seed: int) -> None:
    rng = random.Random(seed)
    window, chunk_size = rng.choice([1, 3, 4, 9, 32]), rng.choice([3, 8, 64])
    size = least(window, chunk_size) + rng.choice([0, PAGE, 16 * PAGE])
    sim = windowed(
        window,
        chunk_size=chunk_size,
        num_window_tokens=size,
        num_tokens=rng.choice([48, 64, 160]),
        max_requests=rng.choice([2, 4]),
        prefill_rows=rng.choice([1, 2, 3]),
        max_running=rng.choice([1, 2, 4]),
        headroom_tokens=rng.choice([1, 4]),
    )
    play_random_traffic(sim, rng, f"seed {seed}")
    assert nobody_holds(sim) == size
