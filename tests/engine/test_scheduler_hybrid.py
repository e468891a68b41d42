"""The scheduler with recurrent layers: slots remember the tokens their state has seen.

Every plan has its page size: 1 on the base path (no track slots), else 4.
"""

from __future__ import annotations

import random

import pytest

from tests.engine.scheduler_sim import Sim, expected_output, play_random_traffic, prompt
from uhrc_core.baseline import ChunkCache
from uhrc_core.errors import RequestTooLargeError
from uhrc_core.kinds import ComponentType
from uhrc_engine.batch import StepKind
from uhrc_engine.request import FinishReason
from uhrc_recurrent.holding import TrackPlan

RECURRENT = ComponentType.RECURRENT
STEM = prompt(16)
all_plans = pytest.mark.parametrize("num_tracks", [0, 1, 2])


def hybrid(num_tracks: int, *, interval: int = 8, **fields: object) -> Sim:
    page_size = 4 if num_tracks else 1
    plan = TrackPlan.make(num_tracks, interval, page_size, kernel_chunk=4)
    return Sim(page_size=page_size, plan=plan, **fields)  # type: ignore[arg-type]


def serve(sim: Sim, rid: str, tokens: list[int], count: int = 3) -> None:
    sim.add(rid, tokens, count)
    sim.run()
    assert sim.output(rid) == expected_output(tokens, count)


def slots_nobody_holds(sim: Sim) -> int:
    return sim.cache.available_size(RECURRENT) + sim.cache.evictable_size(RECURRENT)


# -- where forwards end --------------------------------------------------------------------------


def test_forwards_end_where_a_state_is_kept() -> None:
    sim = hybrid(1, chunk_size=64)
    serve(sim, "a", prompt(21), 5)
    p, d = StepKind.PREFILL, StepKind.DECODE
    prefill = [(p, 0, 8), (p, 8, 16), (p, 16, 21)]
    assert sim.rows_of("a") == [*prefill, *((d, n, n + 1) for n in range(21, 25))]
    kept = [slots.track is not None for slots in sim.slots_of("a")]
    assert [stop for (_, _, stop), k in zip(sim.rows_of("a"), kept, strict=True) if k] == [
        8,
        16,
        24,
    ]


def test_a_forward_ends_at_a_fork_so_that_the_third_request_hits_there() -> None:
    sim = hybrid(1, interval=16, chunk_size=64)
    for i, rid in enumerate("abc"):
        serve(sim, rid, prompt(24) + prompt(9, seed=i + 1))
    assert [row[1:] for row in sim.rows_of("b")[:3]] == [(16, 24), (24, 32), (32, 33)]
    assert [sim.done[rid].cached_tokens for rid in "abc"] == [0, 16, 24]


def test_the_base_path_keeps_the_state_of_a_fork_only() -> None:
    sim = hybrid(0, chunk_size=64)
    for rid in "abc":
        serve(sim, rid, prompt(19))
    assert [row[1:] for row in sim.rows_of("a")[:1]] == [(0, 19)]
    assert [row[1:] for row in sim.rows_of("b")[:2]] == [(0, 16), (16, 19)]
    assert [sim.done[rid].cached_tokens for rid in "abc"] == [0, 0, 16]


# -- clones --------------------------------------------------------------------------------------


def test_a_hit_is_cloned_once_and_what_is_not_cloned_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = hybrid(1, prefill_rows=2)
    started, started_req = [], sim.cache.started_req
    monkeypatch.setattr(
        sim.cache, "started_req", lambda req: (started.append(req.rid), started_req(req))
    )
    serve(sim, "a", STEM + prompt(3))
    for i, rid in enumerate("bcd"):
        sim.add(rid, (STEM if rid != "c" else []) + prompt(12, seed=i + 1), 4)
    sim.run()
    cloned = [
        row.request.rid for b in sim.batches for row in b.rows if row.slots.clone_src is not None
    ]
    assert started == cloned == ["b", "d"]


def test_the_source_of_a_clone_is_locked_until_it_is_copied() -> None:
    sim = hybrid(1)
    serve(sim, "a", STEM + prompt(3))
    sim.add("b", STEM + prompt(3, seed=1), 2)
    batch = sim.scheduler.next_batch()
    assert sim.cache.protected_size(RECURRENT) == 1
    sim.scheduler.cloned(batch)
    assert sim.cache.protected_size(RECURRENT) == 0


@pytest.mark.parametrize("cloned", [False, True])
@all_plans
def test_a_step_that_fails_frees_its_slots_and_keeps_the_snapshot(
    num_tracks: int, cloned: bool
) -> None:
    sim = hybrid(num_tracks)
    for rid in "abc":
        serve(sim, rid, STEM + prompt(3))
    hit = sim.done["c"].cached_tokens
    sim.add("d", STEM + prompt(3), 2)
    batch = sim.scheduler.next_batch()
    if cloned:
        sim.scheduler.cloned(batch)
    sim.scheduler.fail(batch.rows[0].request, RuntimeError("device lost"))
    sim.device.check()
    assert slots_nobody_holds(sim) == 32 and sim.cache.num_receipts() == 0
    serve(sim, "e", STEM + prompt(3))
    assert hit == sim.done["e"].cached_tokens == 16


# -- leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rid", ["a", "b", "c"])
@all_plans
def test_abort_at_every_step_frees_every_slot_and_disturbs_nobody(
    num_tracks: int, rid: str
) -> None:
    asked = {name: STEM + prompt(9, seed=i // 2) for i, name in enumerate("abc")}
    for at_step in range(16):
        sim = hybrid(num_tracks, num_slots=8, prefill_rows=2, max_running=2)
        for name, tokens in asked.items():
            sim.add(name, tokens, 6)
        for _ in range(at_step):
            sim.step()
        in_flight = rid not in sim.done
        assert sim.scheduler.abort(rid) == in_flight
        sim.device.check()
        sim.run()
        for name, tokens in asked.items():
            cut_short = name == rid and in_flight
            assert (sim.done[name].finish_reason is FinishReason.ABORT) == cut_short
            whole = expected_output(tokens, 6)
            assert sim.output(name) == (whole[: len(sim.output(name))] if cut_short else whole)
        assert slots_nobody_holds(sim) == 8 and sim.cache.num_receipts() == 0


@pytest.mark.parametrize("length", range(7, 16))
@all_plans
def test_retraction_in_every_track_state_changes_no_output(num_tracks: int, length: int) -> None:
    sim = hybrid(num_tracks, num_tokens=64, headroom_tokens=1, num_slots=12)
    for i in range(3):
        sim.add(f"r{i}", prompt(length, seed=i), 26)
    sim.run()
    assert sim.scheduler.num_retractions > 0
    for i in range(3):
        assert sim.output(f"r{i}") == expected_output(prompt(length, seed=i), 26)
    assert slots_nobody_holds(sim) == 12 and sim.cache.num_receipts() == 0


# -- few slots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("beyond_least", [0, 1, 2, 5])
@all_plans
def test_few_slots_change_no_output_and_nothing_waits_for_ever(
    num_tracks: int, beyond_least: int
) -> None:
    """At least: what one request owns, and the snapshot it is cloned from."""
    sim = hybrid(num_tracks, num_slots=2 + num_tracks + beyond_least, prefill_rows=2)
    asked = {f"r{i}": STEM[: 8 * (i % 3)] + prompt(5 + i, seed=i % 4) for i in range(10)}
    for rid, tokens in asked.items():
        sim.add(rid, tokens, 9)
    sim.run()
    assert all(sim.output(rid) == expected_output(tokens, 9) for rid, tokens in asked.items())


@pytest.mark.parametrize("num_tracks", [1, 2])
def test_a_request_that_waits_for_slots_holds_nothing(num_tracks: int) -> None:
    owned = 1 + num_tracks
    sim = hybrid(num_tracks, num_slots=2 * owned - 1, prefill_rows=2)
    sim.add("a", prompt(20), 12)
    sim.add("b", prompt(20, seed=1), 12)
    while "a" not in sim.done:
        sim.step()
        if sim.scheduler.running:
            assert [state.request.rid for state in sim.cache.live_requests()] == ["a"]
            assert sim.cache.num_receipts() == 1
            in_use = 2 * owned - 1 - slots_nobody_holds(sim)
            assert in_use == owned + sim.cache.protected_size(RECURRENT)
    sim.run()
    assert sim.output("b") == expected_output(prompt(20, seed=1), 12)


def test_a_request_that_owns_more_slots_than_there_are_is_refused_and_holds_nothing() -> None:
    sim = hybrid(2, num_slots=2)
    with pytest.raises(RequestTooLargeError, match="needs 4 RECURRENT units, the pool has 2"):
        sim.add("a", prompt(5), 1)
    assert not sim.scheduler.has_work
    assert sim.cache.available_size(RECURRENT) == 2


# -- waiting for a prefix that another request computes ------------------------------------------


def first_rows(sim: Sim, shared: int) -> list[str]:
    """Who is in the first of the steps that two requests with one beginning need."""
    sim.add("a", prompt(shared) + prompt(9, seed=1), 2)
    sim.add("b", prompt(shared) + prompt(9, seed=2), 2)
    sim.run()
    for seed, rid in enumerate("ab", start=1):
        assert sim.output(rid) == expected_output(prompt(shared) + prompt(9, seed=seed), 2)
    return [row.request.rid for row in sim.batches[0].rows]


@pytest.mark.parametrize(("interval", "hit"), [(8, 16), (16, 16)])
def test_a_request_waits_for_a_state_that_another_one_will_keep(interval: int, hit: int) -> None:
    sim = hybrid(1, interval=interval, prefill_rows=2, chunk_size=4)
    assert first_rows(sim, 19) == ["a"]
    assert sim.done["b"].cached_tokens == hit


@pytest.mark.parametrize("sim", [hybrid(0, prefill_rows=2), hybrid(1, interval=32, prefill_rows=2)])
def test_a_request_does_not_wait_where_no_state_will_be_kept(sim: Sim) -> None:
    """The base path publishes when a request ends; an interval may be beyond what is shared."""
    assert first_rows(sim, 19) == ["a", "b"]


# -- all together --------------------------------------------------------------------------------


@all_plans
def test_without_reuse_a_hybrid_gives_the_same_text(num_tracks: int) -> None:
    sim = hybrid(num_tracks, num_slots=7, cache_class=ChunkCache, prefill_rows=2)
    play_random_traffic(sim, random.Random(num_tracks), f"{num_tracks} tracks")
    assert sim.cache.available_size(RECURRENT) == 7
    assert all(not req.cached_tokens for req in sim.done.values())


@pytest.mark.parametrize("seed", range(90))
def test_random_traffic_gives_every_request_its_own_text(seed: int) -> None:
    rng = random.Random(seed)
    num_tracks = seed % 3
    sim = hybrid(
        num_tracks,
        interval=rng.choice([4, 8, 24]),
        num_slots=rng.choice([2 + num_tracks, 3 + num_tracks, 3 + 2 * num_tracks, 32]),
        num_tokens=rng.choice([48, 64, 160]),
        max_requests=rng.choice([2, 4]),
        prefill_rows=rng.choice([1, 2, 3]),
        max_running=rng.choice([1, 2, 4]),
        headroom_tokens=rng.choice([1, 4]),
        chunk_size=rng.choice([3, 8, 64]),
    )
    play_random_traffic(sim, rng, f"seed {seed}")
    assert slots_nobody_holds(sim) == sim.cache.components[1].allocator.capacity
