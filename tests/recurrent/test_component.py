"""RECURRENT in the tree: snapshots, clones, tracks, branching, and slots that are never lost."""

from __future__ import annotations

import numpy as np
import pytest

import uhrc_core as uhrc
from tests.recurrent.fake_device import RECURRENT, FakeDevice, component_of, hybrid_cache
from tests.support import PlainRequest, paged_tokens
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    MissReason,
)
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.errors import (
    InvalidIndexError,
    InvalidParamsError,
    RequestTooLargeError,
    StaleNodeError,
)
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.testing.paper import PaperDevice
from uhrc_core.testing.paper import PlainRequest as PaperRequest
from uhrc_recurrent.holding import TrackPlan

FULL = ComponentType.FULL


def insert(cache: UnifiedRadixCache, tokens: list[int], snapshot: bool = True) -> UnifiedTreeNode:
    """Insert with a snapshot at the end, or with FULL alone."""
    value = cache.token_allocator.alloc(len(tokens))
    assert value is not None
    slot = component_of(cache).allocator.alloc(1) if snapshot else None
    done = cache.insert(
        InsertParams(
            key=RadixKey(tokens),
            value=value,
            recurrent_value=None if slot is None else int(slot[0]),
            recurrent_seqlen=None if slot is None else len(tokens),
        )
    )
    cache.token_allocator.free(value[: done.prefix_len])
    if slot is not None and done.recurrent_exist:
        component_of(cache).allocator.free(slot)
    return done.node


def match(cache: UnifiedRadixCache, tokens: list[int]) -> MatchResult:
    return cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens), cow_recurrent=True))


def slot_of(node: UnifiedTreeNode) -> int | None:
    value = node.component_data[RECURRENT].value
    return None if value is None else int(value[0])


# -- tree ----------------------------------------------------------------------------------------


def test_a_hit_ends_at_the_deepest_snapshot_and_not_at_the_first_gap() -> None:
    cache = hybrid_cache()
    insert(cache, [1, 2], snapshot=False)
    deep = insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 3, 4], snapshot=False)
    result = match(cache, [1, 2, 3, 4, 5])
    assert (result.hit_len, result.full_hit_length) == (3, 4)
    assert result.best_match_node is deep and result.recurrent_cow_src == slot_of(deep)
    assert result.miss_reason is MissReason.NO_SNAPSHOT
    assert match(cache, [1, 2]).hit_len == 0
    assert cache.peek_prefix_len(RadixKey([1, 2, 3, 4])) == 3
    assert cache.stats().miss_reasons[MissReason.NO_SNAPSHOT] == 2


def test_split_leaves_the_snapshot_with_the_child() -> None:
    cache = hybrid_cache()
    node = insert(cache, [1, 2, 3, 4])
    slot, lock = slot_of(node), cache.inc_lock_ref(node)
    other = insert(cache, [1, 2, 9])
    upper = node.parent
    assert upper is other.parent and upper is not None and upper.end == 2
    assert slot_of(node) == slot and node.component_data[RECURRENT].lock_ref == 1
    assert slot_of(upper) is None and upper.component_data[RECURRENT].lock_ref == 0
    assert upper.component_data[FULL].lock_ref == 1
    cache.dec_lock_ref(node, lock.to_dec_params())
    cache.check_invariants()


def test_a_match_inside_an_edge_does_not_split_for_nothing() -> None:
    cache = hybrid_cache()
    insert(cache, [1, 2, 3, 4])
    before = len(cache.nodes())
    result = match(cache, [1, 2, 9])
    assert (result.hit_len, result.full_hit_length) == (0, 2)
    assert len(cache.nodes()) == before


def test_a_snapshot_in_the_middle_of_a_key_makes_its_node() -> None:
    cache = hybrid_cache()
    value, slot = cache.token_allocator.alloc(4), component_of(cache).allocator.alloc(1)
    assert value is not None and slot is not None
    key = RadixKey([1, 2, 3, 4])
    params = {"recurrent_value": int(slot[0]), "recurrent_seqlen": 2}
    cache.insert(InsertParams(key=key, value=value, **params))
    assert match(cache, [1, 2, 3, 4]).hit_len == 2
    cache.check_invariants()


def test_a_second_snapshot_at_a_node_is_left_to_its_donor() -> None:
    cache = hybrid_cache()
    node = insert(cache, [1, 2])
    slot = slot_of(node)
    insert(cache, [1, 2])
    assert slot_of(node) == slot and cache.available_size(RECURRENT) == 7
    cache.check_invariants()


def test_bad_snapshots_are_refused_and_change_nothing() -> None:
    cache = hybrid_cache(page_size=2, plan=TrackPlan(1, 2, 2))
    value, slot = cache.token_allocator.alloc(4), component_of(cache).allocator.alloc(1)
    assert value is not None and slot is not None
    key, mine, before = RadixKey([1, 2, 3, 4]), int(slot[0]), cache.digest()
    for error, fields in (
        (InvalidParamsError, {"recurrent_value": mine}),
        (InvalidParamsError, {"recurrent_seqlen": 4}),
        (InvalidParamsError, {"recurrent_value": mine, "recurrent_seqlen": 3}),
        (InvalidParamsError, {"recurrent_value": mine, "recurrent_seqlen": 6}),
        (InvalidParamsError, {"recurrent_value": -1, "recurrent_seqlen": 4}),
        (InvalidIndexError, {"recurrent_value": mine + 1, "recurrent_seqlen": 4}),
        (InvalidIndexError, {"recurrent_value": 99, "recurrent_seqlen": 4}),
        (InvalidParamsError, {"recurrent_value": 2**31, "recurrent_seqlen": 4}),
    ):
        with pytest.raises(error):
            cache.insert(InsertParams(key=key, value=value, **fields))
        assert cache.digest() == before


def test_only_the_consumed_snapshot_is_refreshed() -> None:
    cache = hybrid_cache()
    nodes = [insert(cache, [1] * n) for n in (1, 2, 3)]
    match(cache, [1, 1, 1])
    times = [node.component_data[RECURRENT].last_access_time for node in nodes]
    assert times == [1, 2, 4]
    assert [node.component_data[FULL].last_access_time for node in nodes] == [4, 4, 4]
    cache.evict(EvictParams(recurrent_num=2))
    assert [slot_of(node) is None for node in nodes] == [True, True, False]
    assert match(cache, [1, 1, 1]).hit_len == 3
    cache.check_invariants()


def test_an_internal_snapshot_goes_alone_and_a_leafs_takes_the_leaf() -> None:
    cache = hybrid_cache()
    insert(cache, [1, 1])
    insert(cache, [1, 1, 2])
    first = cache.evict(EvictParams(recurrent_num=1))
    assert (first.recurrent_num_evicted, first.num_tokens_evicted) == (1, 0)
    second = cache.evict(EvictParams(recurrent_num=1))
    assert (second.recurrent_num_evicted, second.num_tokens_evicted) == (1, 1)
    assert cache.evictable_size(FULL) == 2
    cache.check_invariants()


def test_full_eviction_takes_useless_tails_first() -> None:
    cache = hybrid_cache()
    insert(cache, [1, 1])
    insert(cache, [2, 2])
    insert(cache, [2, 2, 3, 3], snapshot=False)  # the most recent, but it can give no hit
    assert cache.evict(EvictParams(num_tokens=2)).num_tokens_evicted == 2
    assert match(cache, [1, 1]).hit_len == 2 and match(cache, [2, 2]).hit_len == 2


def test_a_snapshot_lost_under_a_lock_makes_its_tail_useless_after_it() -> None:
    cache = hybrid_cache()
    older, leaf = insert(cache, [1, 1]), insert(cache, [2, 2])
    insert(cache, [3, 3], snapshot=False)
    cache.evict(EvictParams(num_tokens=1))  # passes over the two that can still give a hit
    locks = [cache.inc_lock_ref(older), cache.inc_lock_ref(leaf)]
    cache.release_early(locks[1], RECURRENT)
    cache.evict(EvictParams(recurrent_num=1))
    assert slot_of(leaf) is None and cache.protected_size(FULL) == 4
    for lock in locks:
        cache.dec_lock_ref(lock.node, lock.to_dec_params())
    cache.evict(EvictParams(num_tokens=1))
    assert match(cache, [1, 1]).hit_len == 2
    cache.check_invariants()


def test_a_lock_holds_one_snapshot_and_its_part_can_go_early_once() -> None:
    cache = hybrid_cache()
    above, leaf = insert(cache, [1]), insert(cache, [1, 2])
    first, second = cache.inc_lock_ref(leaf), cache.inc_lock_ref(leaf)
    assert above.component_data[RECURRENT].lock_ref == 0
    assert cache.protected_size(RECURRENT) == 1
    for _ in range(2):
        cache.release_early(first, RECURRENT)
        assert leaf.component_data[RECURRENT].lock_ref == 1
    cache.dec_lock_ref(leaf, first.to_dec_params())
    assert leaf.component_data[RECURRENT].lock_ref == 1
    cache.dec_lock_ref(leaf, second.to_dec_params())
    assert cache.protected_size(RECURRENT) == 0
    with pytest.raises(InvalidParamsError, match="held to the end"):
        cache.release_early(cache.inc_lock_ref(leaf), FULL)


# -- requests, base path -------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7])
def test_base_path_donates_the_running_slot(length: int) -> None:
    device = FakeDevice(hybrid_cache())
    tokens = list(range(length))
    assert device.serve(tokens, "a").hit_len == 0
    assert device.cache.evictable_size(RECURRENT) == 1
    assert device.serve([*tokens, 99], "longer").hit_len == length
    assert device.serve([*tokens, 99, 98], "turn").hit_len == length + 1
    assert device.cache.available_size(RECURRENT) == 8 - 3


@pytest.mark.parametrize("num_slots", [2, 8])
def test_base_path_keeps_the_branching_state_when_a_slot_is_free(num_slots: int) -> None:
    """The same prompt: the last token is computed anew, so the hit must end before it."""
    device = FakeDevice(hybrid_cache(num_slots=num_slots))
    hits = [device.serve([1, 2, 3, 4, 5], str(n)).hit_len for n in range(3)]
    assert hits == ([0, 0, 4] if num_slots > 2 else [0, 0, 0])


def test_base_path_publishes_nothing_before_the_end() -> None:
    device = FakeDevice(hybrid_cache())
    req = PlainRequest("a", [1, 2, 3, 4])
    device.admit(req)
    device.clone(req)
    device.prefill(req, chunk=2)
    assert device.cache.nodes()[1:] == []
    device.cache.retract_req(req)
    assert device.serve([1, 2, 3, 4, 5]).hit_len == 4


# -- requests, extra buffer ----------------------------------------------------------------------

PLANS = [TrackPlan.make(k, interval, 4, 2) for k in (1, 2) for interval in (4, 8)]


@pytest.mark.parametrize("plan", PLANS)
def test_a_prompt_of_three_intervals_sent_three_times(plan: TrackPlan) -> None:
    device = FakeDevice(hybrid_cache(page_size=4, num_slots=16, plan=plan))
    tokens = list(range(3 * plan.interval))
    hits = [device.serve(tokens, str(n), chunk=5).hit_len for n in range(3)]
    branching = (3 * plan.interval - 1) // 4 * 4  # the second one keeps a state there
    assert hits == [0, 2 * plan.interval, branching]
    assert device.serve([*tokens, 99], "next").hit_len == 3 * plan.interval


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("chunk", [3, 8, 1000])
def test_forwards_end_at_boundaries_and_never_span_one(plan: TrackPlan, chunk: int) -> None:
    device = FakeDevice(hybrid_cache(page_size=4, num_slots=16, plan=plan))
    req = PlainRequest("a", list(range(30)))
    device.admit(req)
    device.clone(req)
    assert device.prefill(req, chunk)
    for boundary in range(plan.interval, 30, plan.interval):
        key = RadixKey([*range(boundary), 99])
        assert device.cache.peek_prefix_len(key) == boundary
    for length in range(30, 40):  # decode, a token a step
        req.token_ids.append(length)
        assert device.forward(req, length + 1)
    device.cache.cache_finished_req(req)
    device.check()
    assert device.serve(list(range(60)), "b").hit_len == 40 // plan.interval * plan.interval


def test_two_conversations_that_fork_inside_an_interval_the_third_hits_the_fork() -> None:
    device = FakeDevice(hybrid_cache(64, 4, num_slots=32, plan=TrackPlan.make(2, 32, 4, 4)))
    shared = list(range(50))
    assert device.serve([*shared, *range(100, 130)], "a").hit_len == 0
    second = device.serve([*shared, *range(200, 230)], "b")
    assert (second.hit_len, second.full_hit_length) == (32, 48)
    assert second.recurrent_branching_seqlen == 48
    third = device.serve([*shared, *range(300, 330)], "c")
    assert third.hit_len == 48 and third.recurrent_branching_seqlen is None


def test_branching_is_floored_to_the_kernel_grid() -> None:
    device = FakeDevice(hybrid_cache(64, 2, num_slots=32, plan=TrackPlan.make(2, 32, 2, 8)))
    device.serve([*range(46), *range(100, 130)], "a")
    result = device.serve([*range(46), *range(200, 230)], "b")
    assert (result.full_hit_length, result.recurrent_branching_seqlen) == (46, 40)


def test_a_match_whose_node_has_grown_is_stale_even_if_its_slot_came_round_again() -> None:
    cache = uhrc.build_kv_cache(
        page_size=2, full_tokens=64, recurrent_slots=3, recurrent_backend="kda", track_interval=2
    )
    device = PaperDevice(cache)
    first = PaperRequest("a", list(range(20)))
    assert device.admit(first)
    device.start(first)

    def publish(upto: int) -> None:
        assert device.extend(first, upto) == upto
        device.forward(first, upto)
        cache.cache_unfinished_req(first)

    publish(2)
    late = PaperRequest("b", [0, 1, 9, 9])
    match = cache.match_req(late)
    assert (match.hit_len, match.recurrent_cow_src) == (2, 1)
    publish(4)
    publish(6)
    cache.abort_req(first)
    with pytest.raises(StaleNodeError, match="the snapshot after 2 tokens was slot 1"):
        cache.admit_req(late, match, 2)
    cache.check_invariants()


def test_the_clones_source_is_locked_until_the_copy_is_dispatched() -> None:
    device = FakeDevice(hybrid_cache(page_size=4, num_slots=8, plan=TrackPlan.make(1, 4, 4, 4)))
    device.serve(list(range(9)), "a")
    req = PlainRequest("b", list(range(9)))
    assert device.admit(req) is not None
    source = device.cache.request_state("b").holding(RECURRENT).slots.clone_src
    assert source is not None and device.cache.protected_size(RECURRENT) == 1
    device.cache.evict(EvictParams(recurrent_num=8))
    assert device.cache.protected_size(RECURRENT) == 1
    device.clone(req)
    assert device.cache.protected_size(RECURRENT) == 0
    device.cache.evict(EvictParams(recurrent_num=8))
    assert device.prefill(req)
    device.cache.cache_finished_req(req)
    device.check()


def test_a_running_request_donates_only_against_a_replacement() -> None:
    plan = TrackPlan.make(1, 4, 4, 4)
    device = FakeDevice(hybrid_cache(page_size=4, num_slots=2, plan=plan))
    req = PlainRequest("a", list(range(14)))
    device.admit(req)
    device.clone(req)
    assert device.prefill(req)
    assert device.cache.nodes()[1:] == []  # no third slot, so nothing was given away
    assert device.cache.available_size(RECURRENT) == 0
    device.cache.cache_finished_req(req)
    device.check()
    assert device.cache.peek_prefix_len(RadixKey(list(range(14)))) == 12
    assert device.cache.available_size(RECURRENT) == 1


def test_a_match_whose_snapshot_went_elsewhere_is_refused() -> None:
    device = FakeDevice(hybrid_cache(num_slots=4))
    device.serve([1, 2], "a")
    device.serve([1, 2, 3, 4], "b")
    holder = PlainRequest("holder", [1, 2, 3, 4, 5])
    assert device.admit(holder) is not None
    late = PlainRequest("late", [1, 2, 9])
    match = device.cache.match_req(late)
    assert match.hit_len == 2
    device.cache.evict(EvictParams(recurrent_num=1))  # the node stays, its snapshot does not
    before = device.cache.digest()
    with pytest.raises(StaleNodeError, match="match again"):
        device.cache.admit_req(late, match, num_tokens=1)
    assert device.cache.digest() == before and device.cache.num_receipts() == 1
    again = device.admit(late)
    assert again is not None and again.hit_len == 0


def test_a_live_requests_slot_cannot_be_inserted_or_freed_by_others() -> None:
    device = FakeDevice(hybrid_cache())
    req = PlainRequest("a", [1, 2, 3])
    device.admit(req)
    device.clone(req)
    device.forward(req, 2)
    slots = device.cache.state_slots(req, 2, 3)
    value = device.cache.token_allocator.alloc(2)
    assert slots is not None and value is not None
    params = {"recurrent_value": slots.running, "recurrent_seqlen": 2}
    with pytest.raises(InvalidIndexError, match="a live request's"):
        device.cache.insert(InsertParams(key=RadixKey([7, 8]), value=value, **params))
    device.cache.token_allocator.free(value)
    device.cache.abort_req(req)
    device.check()


@pytest.mark.parametrize("k", range(4))
def test_the_kth_slot_allocation_failing_is_a_refused_admission(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = TrackPlan.make(1, 4, 4, 4)
    device = FakeDevice(hybrid_cache(page_size=4, num_slots=6, plan=plan))
    pool, calls = component_of(device.cache).allocator, 0
    honest = pool.alloc

    def alloc(num_indices: int, dp_rank: int = 0) -> IndexArray | None:
        nonlocal calls
        calls += 1
        return None if calls == k + 1 else honest(num_indices, dp_rank)

    monkeypatch.setattr(pool, "alloc", alloc)
    for name in "abc":
        req = PlainRequest(name, [*range(14), ord(name)])
        while device.admit(req) is None:
            device.check()
        device.clone(req)
        assert device.prefill(req)
        device.cache.cache_finished_req(req)
        device.check()
    assert device.cache.available_size(RECURRENT) + device.cache.evictable_size(RECURRENT) == 6


def test_all_snapshots_locked_and_no_slot_free_never_raises() -> None:
    plan = TrackPlan.make(2, 4, 4, 4)
    device = FakeDevice(hybrid_cache(page_size=4, num_slots=5, plan=plan))
    device.serve(list(range(8)), "a")
    locks = [device.cache.inc_lock_ref(n) for n in device.cache.nodes()[1:]]
    assert device.cache.protected_size(RECURRENT) == 2
    runs = device.admit(PlainRequest("b", list(range(50, 70))))
    waits = device.admit(PlainRequest("c", list(range(70, 90))))
    assert runs is not None and waits is None
    device.clone(PlainRequest("b", list(range(50, 70))))
    assert device.prefill(PlainRequest("b", list(range(50, 70))))
    device.cache.cache_finished_req(PlainRequest("b", list(range(50, 70))))
    for lock in locks:
        device.cache.dec_lock_ref(lock.node, lock.to_dec_params())
    assert device.admit(PlainRequest("c", list(range(70, 90)))) is not None
    device.check()


def test_a_kept_state_beyond_the_key_is_not_donated() -> None:
    """A step that overshot the accepted tokens: the other track's state is used instead."""
    device = FakeDevice(hybrid_cache(page_size=4, num_slots=8, plan=TrackPlan.make(2, 4, 4, 4)))
    req = PlainRequest("a", list(range(13)))
    device.admit(req)
    device.clone(req)
    for stop in (4, 8, 12):
        device.forward(req, stop)
    req.token_ids = req.token_ids[:10]
    device.cache.cache_finished_req(req)
    device.check()
    assert device.cache.peek_prefix_len(RadixKey(list(range(12)))) == 8


@pytest.mark.parametrize("how", ["finish", "abort", "retract"])
@pytest.mark.parametrize("plan", [None, *PLANS])
@pytest.mark.parametrize("step", range(8))
def test_leaving_in_every_state_loses_no_slot(how: str, plan: TrackPlan | None, step: int) -> None:
    page_size = 4 if plan else 1
    device = FakeDevice(hybrid_cache(64, page_size, num_slots=6, plan=plan))
    device.serve(paged_tokens([1, 2], 4), "before")
    req = PlainRequest("a", [*paged_tokens([1, 2, 3, 4, 5], 4), 7, 8])
    assert device.admit(req) is not None
    if step > 0:
        device.clone(req)
        device.prefill(req, upto=min(8 + 2 * step, 22))
    if step == 7:
        req.token_ids.append(9)
        device.forward(req, 23)
    leave = {
        "finish": device.cache.cache_finished_req,
        "abort": device.cache.abort_req,
        "retract": device.cache.retract_req,
    }[how]
    leave(req)
    device.check()
    free = device.cache.available_size(RECURRENT) + device.cache.evictable_size(RECURRENT)
    assert free == 6 and device.cache.num_receipts() == 0


def test_nothing_waits_for_ever_with_the_smallest_pool() -> None:
    """One running request and the snapshot it clones: 1 + owned slots."""
    plan = TrackPlan.make(2, 4, 4, 4)
    device = FakeDevice(
        hybrid_cache(page_size=4, num_slots=1 + plan.request_owned_slots, plan=plan)
    )
    rng = np.random.default_rng(3)
    for turn in range(60):
        tokens = rng.integers(0, 2, int(rng.integers(1, 40))).tolist()
        device.serve(tokens, str(turn))


# -- random programs -----------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [None, *PLANS])
def test_ten_thousand_random_steps_with_pools_at_their_minimum(plan: TrackPlan | None) -> None:
    """2,000 steps a plan, five plans: slots, tokens and every snapshot's content after each."""
    seed = 11
    print("seed", seed)
    rng = np.random.default_rng(seed)
    page_size = 4 if plan else 1
    owned = plan.request_owned_slots if plan else 1
    cache = hybrid_cache(
        12, page_size, num_slots=2 * owned + 1, plan=plan, dp_size=2, max_requests=3
    )
    device, live, serial = FakeDevice(cache), dict[str, PlainRequest](), 0
    for _ in range(2000):
        action = rng.choice(["arrive", "run", "run", "run", "leave", "evict", "match"])
        if action == "arrive":
            serial += 1
            pages = rng.integers(0, 2, int(rng.integers(1, 6))).tolist()
            tokens = [*paged_tokens(pages, page_size), *rng.integers(0, 2, 2).tolist()]
            req = PlainRequest(f"r{serial}", tokens, dp_rank=int(rng.integers(2)))
            if device.admit(req) is not None:
                live[req.rid] = req
                if rng.random() < 0.8:
                    device.clone(req)
        elif action == "run" and live:
            req = live[str(rng.choice(list(live)))]
            _run(device, req, rng)
        elif action == "leave" and live:
            req = live.pop(str(rng.choice(list(live))))
            leave = [cache.cache_finished_req, cache.abort_req, cache.retract_req]
            leave[int(rng.integers(3))](req)
        elif action == "evict":
            quota = {"num_tokens": int(rng.integers(0, 9)), "recurrent_num": int(rng.integers(3))}
            cache.evict(EvictParams(dp_rank=int(rng.integers(2)), **quota))
        elif action == "match":
            tokens = paged_tokens(rng.integers(0, 2, 4).tolist(), page_size)
            params = MatchPrefixParams(key=RadixKey(tokens, None, int(rng.integers(2))))
            assert cache.peek_prefix_len(params.key) == cache.match_prefix(params).hit_len
        device.check()
    for req in live.values():
        cache.abort_req(req)
    device.check()
    assert cache.stats().hit_num_tokens > 0 and cache.num_receipts() == 0


def _run(device: FakeDevice, req: PlainRequest, rng: np.random.Generator) -> None:
    state = device.cache.request_state(req.rid)
    if state.holding(RECURRENT).slots.clone_src is not None or not state.computed_len:
        device.clone(req)
    if state.computed_len == len(req.token_ids):
        if len(req.token_ids) >= device.cache.req_to_token.max_context_len:
            return
        req.token_ids.append(int(rng.integers(2)))
    stop = int(rng.integers(state.computed_len, len(req.token_ids))) + 1
    stop = next(iter(device.cache.cuts(req, state.computed_len, stop)), stop)
    if device.forward(req, stop) and rng.random() < 0.6:
        device.cache.cache_unfinished_req(req)


# -- what a mutated component would get wrong ------------------------------------------------------


def test_a_running_request_publishes_by_evicting_an_old_snapshot() -> None:
    """All slots hold snapshots nobody uses: the newer one is worth more."""
    plan = TrackPlan.make(1, 4, 4, 4)
    device = FakeDevice(hybrid_cache(page_size=4, num_slots=4, plan=plan))
    for name in range(4):
        device.serve([name * 10 + i for i in range(5)], str(name))
    req = PlainRequest("a", list(range(100, 114)))
    assert device.admit(req) is not None
    device.clone(req)
    assert device.prefill(req, upto=8)
    assert device.cache.peek_prefix_len(RadixKey(req.token_ids)) == 8
    device.cache.abort_req(req)
    device.check()


def test_a_rejected_donation_leaves_the_request_what_it_owns_and_no_more() -> None:
    plan = TrackPlan.make(1, 4, 4, 4)
    device = FakeDevice(hybrid_cache(page_size=4, num_slots=8, plan=plan))
    first, second = (PlainRequest(name, list(range(14))) for name in "ab")
    for req in (first, second):
        assert device.admit(req) is not None
        device.clone(req)
    for req in (first, second):
        device.prefill(req)
        state = device.cache.request_state(req.rid)
        assert len(state.holding(ComponentType.RECURRENT).owned()) == plan.request_owned_slots
        device.check()


def test_a_request_that_needs_more_slots_than_there_are_is_refused_with_the_sum() -> None:
    cache = hybrid_cache(page_size=4, num_slots=2, plan=TrackPlan.make(2, 4, 4, 4))
    with pytest.raises(RequestTooLargeError, match=r"needs 4 RECURRENT units.* has 2"):
        cache.check_fits(4)


def test_the_running_slot_is_not_donated_for_fewer_tokens_than_it_has_seen() -> None:
    device = FakeDevice(hybrid_cache())
    req = PlainRequest("a", [1, 2, 3, 4, 5])
    device.admit(req)
    device.clone(req)
    device.forward(req, 5)
    req.token_ids = req.token_ids[:4]
    device.cache.cache_finished_req(req)
    device.check()
    assert device.cache.nodes()[1:] == []


def test_a_match_names_a_clone_source_only_when_asked() -> None:
    cache = hybrid_cache()
    node = insert(cache, [1, 2])
    plain = cache.match_prefix(MatchPrefixParams(key=RadixKey([1, 2])))
    assert plain.hit_len == 2 and plain.recurrent_cow_src is None
    assert match(cache, [1, 2]).recurrent_cow_src == slot_of(node)
    with pytest.raises(StaleNodeError):  # it would start on a slot nobody wrote
        cache.admit_req(PlainRequest("a", [1, 2, 3]), plain, num_tokens=1)


def test_evicted_snapshots_are_counted() -> None:
    cache = hybrid_cache()
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    cache.evict(EvictParams(recurrent_num=2))
    stats = cache.stats()
    assert stats.evicted.recurrent_num_evicted == 2 and stats.inserted_num_snapshots == 2
