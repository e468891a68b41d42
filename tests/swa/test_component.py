"""SWA in the tree: where a hit ends, what a lock holds, an insert leaves, an eviction takes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import PlainRequest, full_cache, match
from tests.swa.fake_device import (
    FULL,
    SWA,
    Sizes,
    WindowDevice,
    evict_swa,
    insert,
    node_ending,
    spans,
    swa_of,
    take,
    window_cache,
)
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import EvictParams, InsertParams, MissReason
from uhrc_core.errors import (
    CacheError,
    InvalidIndexError,
    InvalidParamsError,
    RequestTooLargeError,
    StaleNodeError,
)

PROMPT = list(range(100, 140))


def swa_lock(cache: BasePrefixCache, end: int) -> int:
    return node_ending(cache, end).component_data[SWA].lock_ref


# -- match ---------------------------------------------------------------------------------------


def test_a_path_without_gaps_hits_however_short() -> None:
    cache = window_cache(Sizes(window=100))
    insert(cache, PROMPT[:10])
    assert match(cache, PROMPT[:3]).hit_len == 3
    assert match(cache, PROMPT).hit_len == 10


@pytest.mark.parametrize("behind", [1, 3, 4, 5])
def test_behind_a_tombstone_a_hit_needs_a_whole_window(behind: int) -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[: 6 + behind], evicted=6)
    result = match(cache, PROMPT)
    assert result.full_hit_length == 6 + behind
    assert result.hit_len == (6 + behind if behind >= 4 else 0)
    reason = MissReason.NO_PREFIX if behind >= 4 else MissReason.SWA_WINDOW
    assert result.miss_reason is reason
    assert cache.stats().miss_reasons[MissReason.SWA_WINDOW] == (behind < 4)


def test_a_hit_may_end_inside_an_edge_once_the_window_is_covered() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:20], evicted=8)
    for length, hit in ((8, 0), (11, 0), (12, 12), (13, 13), (20, 20)):
        key = RadixKey(PROMPT[:length])
        assert cache.peek_prefix_len(key) == hit
        assert match(cache, PROMPT[:length]).hit_len == hit
        cache.check_invariants()


def test_a_hit_behind_a_gap_counts_from_the_gap_not_from_the_root() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:12])
    lock = cache.inc_lock_ref(match(cache, PROMPT[:3]).best_match_node)
    tail = cache.inc_lock_ref(match(cache, PROMPT[:12]).best_match_node)
    assert evict_swa(cache, 1).swa_num_tokens_evicted == 4  # [3, 7): neither lock has it
    assert [cache.peek_prefix_len(RadixKey(PROMPT[:n])) for n in (3, 5, 10, 11)] == [3, 3, 3, 11]
    for held in (lock, tail):
        cache.dec_lock_ref(held.node, held.to_dec_params())
    cache.check_invariants()


def test_only_the_window_is_refreshed() -> None:
    cache = window_cache(Sizes(window=4))
    for end in (2, 4, 6, 8):
        insert(cache, PROMPT[:end])
    before = cache.clock()
    match(cache, PROMPT[:8])
    slots = [node_ending(cache, end).component_data for end in (2, 4, 6, 8)]
    assert [slot[SWA].last_access_time > before for slot in slots] == [False, False, True, True]
    assert [slot[FULL].last_access_time > before for slot in slots] == [True] * 4
    before, hits = cache.clock(), slots[3][SWA].hit_count
    insert(cache, PROMPT[:8])
    assert [slot[SWA].last_access_time > before for slot in slots] == [False, False, True, True]
    assert slots[3][SWA].hit_count == hits


def test_a_stale_match_is_refused_when_its_window_went() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:10])
    insert(cache, PROMPT[:12])
    req = PlainRequest("r", PROMPT[:13])
    found = cache.match_req(req)
    assert found.hit_len == 12
    assert evict_swa(cache, 1).swa_num_tokens_evicted == 10
    with pytest.raises(StaleNodeError):
        cache.admit_req(req, found, num_tokens=1)
    cache.check_invariants()


# -- insert --------------------------------------------------------------------------------------


def test_a_new_leaf_is_cut_where_the_window_data_begins() -> None:
    cache = window_cache(Sizes(window=4))
    assert insert(cache, PROMPT[:10], evicted=6).inserted_len == 10
    assert spans(cache) == [(0, 6, False), (6, 10, True)]
    assert cache.evictable_size(SWA) == 4 and cache.evictable_size(FULL) == 10
    cache.check_invariants()


def test_a_leaf_wholly_before_the_window_data_is_full_alone() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:6], evicted=6)
    insert(cache, PROMPT[:6] + PROMPT[20:24], evicted=10)
    assert spans(cache) == [(0, 6, False), (6, 10, False)]
    assert cache.available_size(SWA) == swa_of(cache).allocator.capacity


@pytest.mark.parametrize(
    ("evicted", "held", "expected"),
    [
        (0, 0, [(0, 8, True)]),
        (3, 0, [(0, 3, False), (3, 8, True)]),
        (8, 0, [(0, 8, False)]),
        (0, 8, [(0, 8, False)]),
    ],
)
def test_recovery_of_a_tombstone(
    evicted: int, held: int, expected: list[tuple[int, int, bool]]
) -> None:
    """`B <= s`, `s < B < e`, `B >= e`, and `prev_prefix_len >= e`."""
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:8], evicted=8)
    indices = node_ending(cache, 8).component_data[FULL].value
    assert indices is not None
    before = indices.tolist()
    value = before[held:] if held else take(cache, 8, evicted)
    params = InsertParams(
        key=RadixKey(PROMPT[:8]), value=value, prev_prefix_len=held, swa_evicted_seqlen=evicted
    )
    cache.insert(params)
    if not held:
        swa_of(cache).swa_allocator.free_for(params.value)
        cache.token_allocator.free(params.value)
    assert spans(cache) == expected
    now = [node.component_data[FULL].value for node in cache.nodes()[1:]]
    assert sorted(i for part in now if part is not None for i in part.tolist()) == sorted(before)
    cache.check_invariants()
    recovered = sum(end - start for start, end, has in expected if has)
    assert cache.evictable_size(SWA) == recovered


def test_recovery_keeps_the_indices_of_a_locked_node_and_its_lock() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:8], evicted=8)
    node = node_ending(cache, 8)
    lock = cache.inc_lock_ref(node)
    before = {n.id: n.component_data[FULL].value for n in cache.nodes()[1:]}
    insert(cache, PROMPT[:8])
    for other in cache.nodes()[1:]:
        held = before[other.id]
        assert held is not None
        assert np.array_equal(held, other.component_data[FULL].value)
    assert cache.protected_size(SWA) == 5 and cache.evictable_size(SWA) == 3
    assert evict_swa(cache, 8).swa_num_tokens_evicted == 3
    cache.dec_lock_ref(node, lock.to_dec_params())
    assert cache.protected_size(SWA) == 0 and cache.evictable_size(SWA) == 5
    cache.check_invariants()


def test_an_insert_over_window_data_gives_the_duplicates_back() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:8])
    free = cache.available_size(SWA), cache.available_size(FULL)
    assert insert(cache, PROMPT[:8]).prefix_len == 8
    assert (cache.available_size(SWA), cache.available_size(FULL)) == free
    cache.check_invariants()


def test_bad_inserts_are_refused_and_change_nothing() -> None:
    cache = window_cache(Sizes(window=4, page_size=2))
    insert(cache, PROMPT[:8])
    value = take(cache, 8, evicted=4)
    key = RadixKey(PROMPT[20:28])
    bare = cache.token_allocator.alloc(8)
    assert bare is not None
    node = node_ending(cache, 8).component_data[FULL].value
    assert node is not None
    before = cache.digest()
    cases: list[tuple[type[CacheError], str, dict[str, object]]] = [
        (InvalidParamsError, "swa_evicted_seqlen: 3", {"value": value, "swa_evicted_seqlen": 3}),
        (InvalidParamsError, "swa_evicted_seqlen", {"value": value, "swa_evicted_seqlen": -2}),
        (InvalidIndexError, "token 0 ", {"value": value}),
        (InvalidIndexError, "token 2 ", {"value": value, "swa_evicted_seqlen": 2}),
        (InvalidIndexError, "no SWA index", {"value": bare}),
        (InvalidIndexError, "owned by the tree", {"value": node}),
        (InvalidIndexError, "owned by the tree", {"value": node, "key": RadixKey(PROMPT[:8])}),
        (InvalidIndexError, "outside", {"value": [9998, 9999] * 4, "key": RadixKey(PROMPT[:8])}),
    ]
    for error, message, fields in cases:
        with pytest.raises(error, match=message):
            cache.insert(InsertParams(**{"key": key, **fields}))
        assert cache.digest() == before
    cache.insert(InsertParams(key=key, value=value, swa_evicted_seqlen=4))
    cache.token_allocator.free(bare)
    cache.check_invariants()


def test_a_cache_without_windows_takes_no_evicted_seqlen() -> None:
    cache = full_cache()
    value = cache.token_allocator.alloc(4)
    with pytest.raises(InvalidParamsError, match="this cache has no"):
        cache.insert(InsertParams(key=RadixKey(PROMPT[:4]), value=value, swa_evicted_seqlen=2))


# -- locks ---------------------------------------------------------------------------------------


def test_a_lock_holds_a_window_and_a_page_not_the_prompt() -> None:
    cache = window_cache(Sizes(window=5, page_size=4))
    insert(cache, PROMPT[:32])
    lock = cache.inc_lock_ref(node_ending(cache, 32))
    assert (cache.protected_size(SWA), cache.protected_size(FULL)) == (12, 32)
    assert spans(cache) == [(0, 20, True), (20, 32, True)]
    cache.check_invariants()
    assert evict_swa(cache, 1).swa_num_tokens_evicted == 20
    cache.dec_lock_ref(lock.node, lock.to_dec_params())
    assert (cache.protected_size(SWA), cache.evictable_size(SWA)) == (0, 12)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("split_at", [None, 9, 10, 11])
@pytest.mark.parametrize("early", [None, 0, 1])
def test_two_holders_never_release_each_other(
    order: tuple[int, int], split_at: int | None, early: int | None
) -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:12])
    node = node_ending(cache, 12)
    locks = [cache.inc_lock_ref(node), cache.inc_lock_ref(node)]
    assert [swa_lock(cache, 12), cache.protected_size(SWA)] == [2, 5]
    if split_at is not None:
        match(cache, PROMPT[:split_at])
    if early is not None:
        cache.release_early(locks[early], SWA)
        cache.release_early(locks[early], SWA)
        assert cache.protected_size(SWA) == 5
    cache.dec_lock_ref(node, locks[order[0]].to_dec_params())
    still = 0 if early == order[1] else 5
    assert cache.protected_size(SWA) == still and cache.protected_size(FULL) == 12
    cache.check_invariants()
    cache.dec_lock_ref(node, locks[order[1]].to_dec_params())
    assert cache.protected_size(SWA) == cache.protected_size(FULL) == 0
    cache.check_invariants()


def test_holders_of_overlapping_windows() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:12])
    upper = cache.inc_lock_ref(match(cache, PROMPT[:10]).best_match_node)
    lower = cache.inc_lock_ref(node_ending(cache, 12))
    assert cache.protected_size(SWA) == 7
    cache.dec_lock_ref(upper.node, upper.to_dec_params())
    assert cache.protected_size(SWA) == 5
    assert evict_swa(cache, 64).swa_num_tokens_evicted == 7
    cache.dec_lock_ref(lower.node, lower.to_dec_params())
    cache.check_invariants()


def test_a_lock_on_the_root_holds_nothing() -> None:
    cache = window_cache(Sizes(window=4))
    lock = cache.inc_lock_ref(cache.nodes()[0])
    cache.dec_lock_ref(lock.node, lock.to_dec_params())
    cache.check_invariants()


def test_a_tombstone_revived_between_acquire_and_release() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:8], evicted=8)
    insert(cache, PROMPT[:12], evicted=8)
    node = node_ending(cache, 12)
    lock = cache.inc_lock_ref(node)
    cache.release_early(lock, SWA)
    assert evict_swa(cache, 64).swa_num_tokens_evicted == 4
    again = cache.inc_lock_ref(node)
    insert(cache, PROMPT[:12])
    assert cache.protected_size(SWA) == 5
    cache.dec_lock_ref(node, lock.to_dec_params())
    assert cache.protected_size(SWA) == 5
    cache.dec_lock_ref(node, again.to_dec_params())
    cache.check_invariants()


def test_split_copies_lock_and_use_and_cuts_the_value() -> None:
    cache = window_cache(Sizes(window=8))
    insert(cache, PROMPT[:8])
    node = node_ending(cache, 8)
    lock = cache.inc_lock_ref(node)
    value = node.component_data[SWA].value
    assert value is not None
    upper = match(cache, PROMPT[:3]).best_match_node
    above, below = upper.component_data[SWA], node.component_data[SWA]
    assert above.value is not None and below.value is not None
    assert [*above.value, *below.value] == value.tolist()
    assert above.value.base is None and below.value.base is None
    assert (above.lock_ref, below.lock_ref, above.queued) == (1, 1, 0)
    cache.dec_lock_ref(node, lock.to_dec_params())
    assert above.queued and below.queued
    cache.check_invariants()


# -- eviction ------------------------------------------------------------------------------------


def test_internal_window_data_goes_without_full() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:4])
    insert(cache, PROMPT[:12])
    match(cache, PROMPT[:12])
    result = evict_swa(cache, 1)
    assert (result.swa_num_tokens_evicted, result.num_tokens_evicted) == (4, 0)
    assert spans(cache) == [(0, 4, False), (4, 12, True)]
    cache.check_invariants()


def test_a_leaf_goes_as_a_whole_and_its_bare_parent_stays_for_full() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:8], evicted=8)
    insert(cache, PROMPT[:12], evicted=8)
    result = evict_swa(cache, 4)
    assert (result.swa_num_tokens_evicted, result.num_tokens_evicted) == (4, 4)
    assert spans(cache) == [(0, 8, False)]
    assert cache.evict(EvictParams(num_tokens=8)).num_tokens_evicted == 8
    assert cache.nodes()[1:] == []
    cache.check_invariants()


def test_evicting_a_full_leaf_takes_its_window_data_along() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:8])
    result = cache.evict(EvictParams(num_tokens=8))
    assert (result.swa_num_tokens_evicted, result.num_tokens_evicted) == (8, 8)
    cache.check_invariants()


def test_a_leaf_gives_up_no_more_of_its_tail_than_is_needed() -> None:
    """Of FULL and of window data alike; what is left is as good a hit as a shorter prompt's."""
    cache = window_cache(Sizes(page_size=2, window=4))
    insert(cache, PROMPT[:16])
    result = cache.evict(EvictParams(num_tokens=3))
    assert (result.swa_num_tokens_evicted, result.num_tokens_evicted) == (4, 4)
    assert cache.peek_prefix_len(RadixKey(PROMPT[:16])) == 12
    result = evict_swa(cache, 1)
    assert (result.swa_num_tokens_evicted, result.num_tokens_evicted) == (2, 2)
    assert cache.peek_prefix_len(RadixKey(PROMPT[:16])) == 10
    cache.check_invariants()


def test_a_tombstone_leaf_is_the_first_full_victim() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:8])
    insert(cache, PROMPT[20:28], evicted=8)
    match(cache, PROMPT[20:28])
    assert cache.evict(EvictParams(num_tokens=8)).num_tokens_evicted == 8
    assert cache.peek_prefix_len(RadixKey(PROMPT[:8])) == 8


def test_a_leaf_locked_for_full_alone_becomes_a_tombstone() -> None:
    cache = window_cache(Sizes(window=4))
    insert(cache, PROMPT[:8])
    lock = cache.inc_lock_ref(node_ending(cache, 8))
    cache.release_early(lock, SWA)
    result = evict_swa(cache, 64)
    assert (result.swa_num_tokens_evicted, result.num_tokens_evicted) == (8, 0)
    assert cache.peek_prefix_len(RadixKey(PROMPT[:8])) == 0
    cache.dec_lock_ref(lock.node, lock.to_dec_params())
    cache.check_invariants()


def test_a_short_window_pool_is_not_paid_for_with_full_data() -> None:
    """The pool that is short gives way: old windows go, the FULL tokens of the prefix stay."""
    cache = window_cache(Sizes(full_pages=200, swa_pages=32, window=4, extend=8))
    device = WindowDevice(cache)
    for start in (0, 1000):
        device.serve(list(range(start, start + 30)))
    assert cache.available_size(FULL) > 100 and cache.available_size(SWA) < 8
    kept = cache.evictable_size(FULL)
    req = PlainRequest("next", list(range(2000, 2030)))
    assert device.admit(req) is not None and device.prefill(req)
    assert cache.evictable_size(FULL) >= kept - 8  # at most a leaf went along
    assert cache.stats().evicted.swa_num_tokens_evicted > 0
    cache.abort_req(req)
    device.check()


# -- life of a request ---------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [1, 3, 4, 8, 100])
def test_a_follow_up_hits_the_whole_turn_before(page_size: int, window: int) -> None:
    device = WindowDevice(
        window_cache(
            Sizes(
                full_pages=800 // page_size,
                swa_pages=800 // page_size,
                page_size=page_size,
                window=window,
                extend=2 * page_size,
            )
        )
    )
    tokens: list[int] = []
    for turn in range(6):
        question = [1000 * turn + i for i in range(5 + 7 * turn)]
        answer = [1000 * turn + 500 + i for i in range(3 + window // 2)]
        found = device.serve(tokens + question, answer)
        assert found.hit_len == len(tokens) // page_size * page_size
        tokens = [*tokens, *question, *answer]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("residue", [-1, 0, 1])
def test_the_same_prompt_three_times(page_size: int, residue: int) -> None:
    device = WindowDevice(window_cache(Sizes(page_size=page_size, window=6, extend=8)))
    prompt = list(range(5 * page_size + 20 + residue))
    hits = [device.serve(prompt).hit_len for _ in range(3)]
    whole = (len(prompt) - 1) // page_size * page_size
    assert hits == [0, whole, whole]


def test_decode_keeps_the_window_and_one_page() -> None:
    cache = window_cache(Sizes(full_pages=64, swa_pages=64, page_size=4, window=6, extend=8))
    device = WindowDevice(cache)
    req = PlainRequest("r", PROMPT[:10])
    assert device.admit(req) is not None and device.prefill(req)
    assert device.decode(req, list(range(200, 300)))
    held = cache.request_state("r").holding(SWA).owned()
    assert 6 + 4 <= len(held) <= 6 + 2 * 4
    assert len(cache.request_state("r").indices(0, 110)) == 110
    assert cache.protected_size(SWA) == 0 and cache.protected_size(FULL) == 8
    cache.cache_finished_req(req)
    device.check()
    assert match(cache, req.token_ids).hit_len == 108


def test_the_lock_is_given_up_when_the_window_has_passed_the_prefix() -> None:
    """Prefix of 9, window 4, a page of 1: 14 tokens leave the prefix behind."""
    cache = window_cache(Sizes(window=4, extend=8))
    device = WindowDevice(cache)
    device.serve(PROMPT[:9])
    req = PlainRequest("r", PROMPT[:9])
    assert device.admit(req) is not None
    assert device.prefill(req, upto=9) is True
    locked, gone = [], []
    for token in range(200, 206):
        assert device.decode(req, [token])
        locked.append(cache.protected_size(SWA))
        gone.append(cache.token_indices(req, len(req.token_ids))[SWA].tolist().count(-1))
    assert cache.request_state("r").protected_len == 9
    assert locked == [5, 5, 5, 5, 0, 0] and gone == [5, 6, 7, 8, 9, 10]
    cache.abort_req(req)
    device.check()


def test_fifty_turns_stay_within_the_window() -> None:
    window, chunk, page_size = 32, 16, 4
    sizes = Sizes(full_pages=2000, swa_pages=60, page_size=page_size, window=window, extend=chunk)
    device = WindowDevice(window_cache(sizes))
    tokens: list[int] = []
    for turn in range(50):
        question = [1000 * turn + i for i in range(40)]
        answer = [1000 * turn + 500 + i for i in range(37)]
        found = device.serve(tokens + question, answer)
        assert found.hit_len == len(tokens) // page_size * page_size
        tokens = [*tokens, *question, *answer]
    assert 0 < device.peak_owned <= window + chunk + 2 * page_size


def test_a_request_alone_runs_in_the_smallest_pool() -> None:
    """Whatever the tree holds: `WindowPlan.request_tokens` are enough, for any prompt and hit."""
    for page_size in (1, 4):
        plan = swa_of(window_cache(Sizes(page_size=page_size, window=6, extend=8))).plan
        sizes = Sizes(
            full_pages=400,
            swa_pages=plan.request_tokens // page_size,
            page_size=page_size,
            window=6,
            extend=8,
        )
        device = WindowDevice(window_cache(sizes))
        tokens = list(range(50))
        for turn in range(8):
            device.serve(tokens, [2000 * turn + i for i in range(23)])
            tokens = tokens + [2000 * turn + i for i in range(23)] + [9000 + turn] * 11


def test_a_request_that_can_never_fit_is_refused_with_the_sum() -> None:
    cache = window_cache(Sizes(full_pages=1000, swa_pages=10, window=8, extend=8))
    with pytest.raises(RequestTooLargeError, match="SWA"):
        cache.check_fits(500)
    cache.check_fits(10)


def test_admission_counts_what_running_windows_can_still_take() -> None:
    """Two long prompts: the second is admitted only while the first cannot starve it."""
    sizes = Sizes(full_pages=1000, swa_pages=30, window=8, extend=8)
    cache = window_cache(sizes)
    device = WindowDevice(cache)
    first, second = PlainRequest("a", list(range(200))), PlainRequest("b", list(range(500, 700)))
    assert device.admit(first) is not None
    assert device.admit(second, num_tokens=400) is None
    assert device.prefill(first)
    cache.cache_finished_req(first)
    assert device.admit(second, num_tokens=400) is not None
    cache.abort_req(second)
    short = [PlainRequest(name, [n, 2, 3]) for n, name in enumerate("cd")]
    for req in short:  # short ones are counted with their tokens, not with whole windows
        assert device.admit(req, num_tokens=6) is not None


@pytest.mark.parametrize(("swa_tokens", "admitted"), [(36, True), (35, False)])
def test_admission_counts_no_more_than_that(swa_tokens: int, admitted: bool) -> None:
    """One request owns 9 tokens and can own 18; so could the next one."""
    device = WindowDevice(window_cache(Sizes(1000, swa_tokens, window=8, extend=8)))
    first, second = PlainRequest("a", list(range(12))), PlainRequest("b", list(range(500, 700)))
    assert device.admit(first) is not None
    assert device.forward(first, 8) and device.forward(first, 12)
    assert (device.admit(second, num_tokens=400) is not None) is admitted


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("how", ["abort", "retract"])
def test_leaving_at_every_step_gives_everything_back(when: int, how: str) -> None:
    cache = window_cache(Sizes(page_size=2, window=4, extend=4))
    device = WindowDevice(cache)
    device.serve(PROMPT[:9], [1, 2, 3])
    req = PlainRequest("r", [*PROMPT[:9], 1, 2, 3, *PROMPT[20:30]])
    steps = [
        lambda: device.admit(req),
        lambda: device.forward(req, 14),
        lambda: cache.cache_unfinished_req(req),
        lambda: device.prefill(req),
        lambda: device.decode(req, [7, 8, 9, 10, 11, 12, 13]),
        lambda: cache.extend_req(req, 1),
    ]
    for step in steps[: when + 1]:
        step()
    (cache.abort_req if how == "abort" else cache.retract_req)(req)
    device.check()
    for kind in (FULL, SWA):
        pool = cache.components[kind].allocator
        assert pool.active_size(0) == pool.protected_size(0) == 0


def test_recovery_while_another_holds_the_tombstone() -> None:
    """A decodes far past its prefix, B recomputes that prefix: A's indices stay, B's hit later."""
    cache = window_cache(Sizes(window=4, extend=8))
    device = WindowDevice(cache)
    a = PlainRequest("a", PROMPT[:10])
    assert device.admit(a) is not None and device.prefill(a)
    assert device.decode(a, list(range(200, 215)))
    mine = cache.request_state("a").indices(0, 10).tolist()
    evict_swa(cache, 64)
    b = PlainRequest("b", PROMPT[:11])
    found = device.admit(b)
    assert found is not None and (found.hit_len, found.full_hit_length) == (0, 10)
    assert device.prefill(b)
    device.check()
    assert cache.request_state("a").indices(0, 10).tolist() == mine
    assert cache.request_state("b").indices(0, 10).tolist() == mine
    cache.cache_finished_req(a)
    cache.cache_finished_req(b)
    device.check()
    assert match(cache, PROMPT[:11]).hit_len == 11
