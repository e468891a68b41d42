"""The scheduler against a fake device, with the cache's invariants checked at every stage."""

from __future__ import annotations

import random

import pytest

from tests.engine.scheduler_sim import Sim, expected_output, play_random_traffic, prompt
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import MatchPrefixParams
from uhrc_core.errors import RequestTooLargeError
from uhrc_engine.batch import StepKind
from uhrc_engine.request import FinishReason, InvalidRequestError, OutOfPagesError

# -- order of steps ----------------------------------------------------------------------------


def test_a_prompt_is_cut_on_the_grid_and_then_decoded_one_by_one() -> None:
    sim = Sim()
    sim.add("a", prompt(19), 3)
    sim.run()
    p, d = StepKind.PREFILL, StepKind.DECODE
    assert sim.rows_of("a") == [(p, 0, 8), (p, 8, 16), (p, 16, 19), (d, 19, 20), (d, 20, 21)]
    assert sim.output("a") == expected_output(prompt(19), 3)
    assert sim.done["a"].finish_reason is FinishReason.LENGTH


def test_a_hit_is_prefilled_on_the_same_grid() -> None:
    sim = Sim()
    sim.add("a", prompt(19), 1)
    sim.run()
    sim.add("b", prompt(12) + prompt(12, seed=1), 1)
    sim.run()
    assert sim.done["b"].cached_tokens == 12
    assert [row[1:] for row in sim.rows_of("b")] == [(12, 16), (16, 24)]


def test_prefill_and_decode_steps_alternate() -> None:
    sim = Sim()
    sim.add("a", prompt(3), 8)
    sim.step()
    sim.add("b", prompt(24, seed=1), 1)
    for _ in range(6):
        sim.step()
    kinds = [batch.kind.value[0] for batch in sim.batches]
    assert "".join(kinds) == "pdpdpdp"


def test_one_output_token_needs_no_decode_step() -> None:
    sim = Sim()
    sim.add("a", prompt(5), 1)
    sim.run()
    assert [batch.kind for batch in sim.batches] == [StepKind.PREFILL]


def test_a_stop_token_ends_the_request_and_is_part_of_the_output() -> None:
    expected = expected_output(prompt(5), 8)
    stop = expected[3]
    sim = Sim()
    sim.add("a", prompt(5), 8, stop_token_ids=(stop,))
    sim.run()
    assert sim.output("a") == expected[: expected.index(stop) + 1]
    assert sim.done["a"].finish_reason is FinishReason.STOP


def test_no_more_requests_run_than_the_limit_allows() -> None:
    sim = Sim(num_tokens=1024, max_running=3)
    for i in range(8):
        sim.add(f"r{i}", prompt(5, seed=i), 6)
    sim.run()
    assert max(len(batch.rows) for batch in sim.batches) == 3


def test_equal_calls_give_equal_decisions() -> None:
    sims = [Sim(num_tokens=64), Sim(num_tokens=64)]
    for sim in sims:
        for i in range(6):
            sim.add(f"r{i}", prompt(9 + i, seed=i % 3), 7)
        sim.run()
    logs = [[sim.rows_of(f"r{i}") for i in range(6)] for sim in sims]
    assert logs[0] == logs[1]
    assert sims[0].cache.digest() == sims[1].cache.digest()


# -- sharing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill_rows", [1, 2, 4])
@pytest.mark.parametrize("length", [15, 16, 17])
def test_one_prompt_arriving_three_times_at_once_is_computed_once(
    prefill_rows: int, length: int
) -> None:
    sim = Sim(prefill_rows=prefill_rows)
    for rid in "abc":
        sim.add(rid, prompt(length), 4)
    sim.run()
    hit = (length - 1) // 4 * 4
    assert [sim.done[rid].cached_tokens for rid in "abc"] == [0, hit, hit]
    assert all(sim.output(rid) == expected_output(prompt(length), 4) for rid in "abc")


@pytest.mark.parametrize("prefill_rows", [1, 3])
def test_a_shared_prefix_arriving_at_once_is_computed_once(prefill_rows: int) -> None:
    sim = Sim(prefill_rows=prefill_rows)
    for i, rid in enumerate("abc"):
        sim.add(rid, prompt(16) + prompt(7, seed=i + 1), 2)
    sim.run()
    assert [sim.done[rid].cached_tokens for rid in "abc"] == [0, 16, 16]


def test_unrelated_prompts_are_prefilled_side_by_side() -> None:
    sim = Sim(prefill_rows=2)
    sim.add("a", prompt(8), 1)
    sim.add("b", prompt(8, seed=1), 1)
    sim.step()
    assert [row.request.rid for row in sim.batches[0].rows] == ["a", "b"]


def test_namespaces_do_not_wait_for_each_other_and_share_nothing() -> None:
    sim = Sim(prefill_rows=2)
    sim.add("a", prompt(8), 1, extra_key="x")
    sim.add("b", prompt(8), 1, extra_key="y")
    sim.step()
    assert len(sim.batches[0].rows) == 2
    assert sim.done["b"].cached_tokens == 0


def test_a_follow_up_turn_hits_the_answer_of_the_turn_before() -> None:
    sim = Sim()
    sim.add("a", prompt(10), 8)
    sim.run()
    follow_up = prompt(10) + sim.output("a") + prompt(5, seed=1)
    sim.add("b", follow_up, 2)
    sim.run()
    # 17 tokens were computed (the last of the 8 never was), 16 of them are whole pages.
    assert sim.done["b"].cached_tokens == 16


# -- admission ---------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_at_once_with_the_sum() -> None:
    sim = Sim(num_tokens=64)
    with pytest.raises(RequestTooLargeError, match=r"65 tokens needs 68 FULL units.* 64 per"):
        sim.add("a", prompt(60), 6)
    assert not sim.scheduler.has_work
    sim.add("b", prompt(60), 5)
    sim.run()
    assert sim.output("b") == expected_output(prompt(60), 5)


def test_a_request_waits_until_the_pool_covers_it_and_its_headroom() -> None:
    sim = Sim(num_tokens=32, headroom_tokens=8)
    sim.add("a", prompt(12), 8)
    sim.add("b", prompt(8, seed=1), 8)
    # a may reach 12 + 8 - 1 = 19 tokens, five pages; b wants 8 + 7 = 15, four pages; of eight.
    while "a" not in sim.done:
        assert [req.rid for req in sim.scheduler.running] in ([], ["a"])
        sim.step()
    sim.run()
    assert sim.scheduler.num_retractions == 0
    assert sim.output("b") == expected_output(prompt(8, seed=1), 8)
    # b was matched when it came and when a had left, not at every step it waited.
    assert sim.cache.stats().match_count == 3


def test_first_come_first_served_although_a_later_one_would_fit() -> None:
    sim = Sim(num_tokens=64, headroom_tokens=16)
    sim.add("a", prompt(20), 16)
    sim.add("big", prompt(40, seed=1), 8)
    sim.add("small", prompt(2, seed=2), 2)
    sim.run()
    firsts = [batch.rows[0].request.rid for batch in sim.batches if batch.rows[0].start == 0]
    assert firsts == ["a", "big", "small"]


def test_nobody_starves_behind_a_stream_of_small_requests() -> None:
    sim = Sim(num_tokens=64, max_running=4, headroom_tokens=4)
    for i in range(4):
        sim.add(f"s{i}", prompt(4, seed=i), 6)
    sim.add("big", prompt(48, seed=99), 4)
    for i in range(4, 60):
        sim.add(f"s{i}", prompt(4, seed=i), 6)
        sim.step()
    assert "big" in sim.done
    sim.run()
    assert len(sim.done) == 61


def test_a_rid_in_flight_is_refused_and_free_again_afterwards() -> None:
    sim = Sim()
    sim.add("a", prompt(5), 2)
    with pytest.raises(InvalidRequestError, match="'a' is in flight"):
        sim.add("a", prompt(6), 2)
    sim.run()
    sim.add("a", prompt(6), 2)
    sim.run()
    assert sim.output("a") == expected_output(prompt(6), 2)


# -- retraction --------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_retraction_changes_no_output(page_size: int) -> None:
    sim = Sim(num_tokens=96, page_size=page_size, headroom_tokens=1)
    for i in range(4):
        sim.add(f"r{i}", prompt(10, seed=i), 50)
    sim.run()
    assert sim.scheduler.num_retractions > 0
    for i in range(4):
        assert sim.output(f"r{i}") == expected_output(prompt(10, seed=i), 50)
    assert sim.done["r0"].retractions == 0


def test_the_latest_admitted_gives_way_and_goes_back_to_the_head_of_the_queue() -> None:
    sim = Sim(num_tokens=48, headroom_tokens=1, max_running=3)
    for i in range(4):
        sim.add(f"r{i}", prompt(8, seed=i), 20)
    while not sim.scheduler.num_retractions:
        sim.step()
    assert [req.rid for req in sim.scheduler.running] == ["r0", "r1"]
    assert [req.rid for req in sim.scheduler.waiting] == ["r2", "r3"]
    kept = sim.scheduler.waiting[0].output
    assert kept
    sim.run()
    assert sim.output("r2")[: len(kept)] == kept


def test_a_retracted_request_resumes_from_the_tree_with_prefill_steps() -> None:
    sim = Sim(num_tokens=48, headroom_tokens=1)
    sim.add("r0", prompt(8), 14)
    sim.add("r1", prompt(18, seed=1), 26)
    while not sim.scheduler.num_retractions:
        sim.step()
    before = sim.rows_of("r1")
    sim.run()
    kind, start, _ = sim.rows_of("r1")[len(before)]
    assert kind is StepKind.PREFILL
    assert start == 24  # tokens it had decoded are reused, too
    assert sim.done["r1"].cached_tokens == 0  # as at its first admission
    assert sim.output("r1") == expected_output(prompt(18, seed=1), 26)


def test_a_request_is_retracted_only_a_few_times() -> None:
    sim = Sim(num_tokens=64, headroom_tokens=4)
    for i in range(4):
        sim.add(f"r{i}", prompt(8, seed=i), 40)
    sim.run()
    assert max(req.retractions for req in sim.done.values()) <= 8


def test_a_request_alone_that_cannot_go_on_fails_and_the_engine_goes_on() -> None:
    sim = Sim(num_tokens=32)
    sim.add("a", prompt(16), 1)
    sim.run()
    match = sim.cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt(16))))
    lock = sim.cache.inc_lock_ref(match.best_match_node)
    sim.add("never admitted", prompt(20, seed=1), 2)
    sim.add("runs out", prompt(7, seed=2), 20)
    sim.add("fine", prompt(7, seed=3), 2)
    sim.run()
    for rid in ("never admitted", "runs out"):
        assert sim.done[rid].finish_reason is FinishReason.ERROR
        assert isinstance(sim.done[rid].error, OutOfPagesError)
    assert sim.output("fine") == expected_output(prompt(7, seed=3), 2)
    sim.cache.dec_lock_ref(lock.node, lock.to_dec_params())
    sim.add("later", prompt(20, seed=1), 2)
    sim.run()
    assert sim.output("later") == expected_output(prompt(20, seed=1), 2)


# -- abort -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_step", range(14))
@pytest.mark.parametrize("rid", ["a", "b", "c"])
def test_abort_at_every_step_frees_everything_and_disturbs_nobody(rid: str, at_step: int) -> None:
    sim = Sim(num_tokens=96, prefill_rows=2, max_running=2)
    for i, name in enumerate("abc"):
        sim.add(name, prompt(16) + prompt(9, seed=i // 2), 6)
    for _ in range(at_step):
        sim.step()
    in_flight = rid not in sim.done
    assert sim.scheduler.abort(rid) == in_flight
    sim.cache.check_invariants()
    sim.run()
    for i, name in enumerate("abc"):
        whole = expected_output(prompt(16) + prompt(9, seed=i // 2), 6)
        if name == rid and in_flight:
            assert sim.done[name].finish_reason is FinishReason.ABORT
            assert sim.output(name) == whole[: len(sim.output(name))]
        else:
            assert sim.output(name) == whole
    assert sim.cache.num_receipts() == 0


def test_abort_of_an_unknown_rid_is_answered_no() -> None:
    assert Sim().scheduler.abort("x") is False


def test_a_forward_that_was_never_dispatched_publishes_nothing() -> None:
    sim = Sim()
    sim.add("a", prompt(8), 2)
    batch = sim.scheduler.next_batch()
    assert batch is not None
    sim.scheduler.fail(batch.rows[0].request, RuntimeError("device lost"))
    sim.cache.check_invariants()
    assert sim.cache.peek_prefix_len(RadixKey(prompt(8))) == 0
    assert [req.finish_reason for req in sim.scheduler.take_finished()] == [FinishReason.ERROR]


# -- all together ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(120))
def test_random_traffic_gives_every_request_its_own_text(seed: int) -> None:
    rng = random.Random(seed)
    sim = Sim(
        num_tokens=rng.choice([48, 64, 96, 160]),
        page_size=rng.choice([1, 2, 4, 16]),
        max_requests=rng.choice([2, 4]),
        prefill_rows=rng.choice([1, 2, 3]),
        max_running=rng.choice([1, 2, 4]),
        headroom_tokens=rng.choice([1, 4, 16]),
        chunk_size=rng.choice([3, 8, 64]),
    )
    play_random_traffic(sim, rng, f"seed {seed}")
