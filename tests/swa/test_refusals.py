"""What a caller may not do with window data: each is refused by name, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support import PlainRequest, admit, match
from tests.swa.fake_device import (
    FULL,
    SWA,
    Sizes,
    WindowDevice,
    evict_swa,
    insert,
    node_ending,
    swa_of,
    take,
    window_cache,
)
from uhrc_core.baseline import ChunkCache, SWARadixCache
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.eviction import LFU
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import EvictParams, InsertParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.errors import CacheError, InvalidIndexError, InvalidParamsError
from uhrc_core.testing.faults import failing_allocation

TREES = [UnifiedRadixCache, SWARadixCache]
SMALL = Sizes(8, 8, page_size=2, window=2, extend=4)


def refused(cache: BasePrefixCache, error: type[CacheError], call: Callable[[], Any]) -> str:
    before = cache.digest()
    with pytest.raises(error) as caught:
        call()
    assert cache.digest() == before
    return str(caught.value)


@pytest.mark.parametrize("kind", TREES)
def test_window_data_before_the_depth_that_is_named(kind: type[BasePrefixCache]) -> None:
    cache = window_cache(SMALL, kind)
    value = take(cache, 4)
    params = InsertParams(key=RadixKey([1, 2, 3, 4]), value=value, swa_evicted_seqlen=2)
    refused(cache, InvalidIndexError, lambda: cache.insert(params))
    swa_of(cache).swa_allocator.free_for(params.value[:2])
    cache.insert(params)
    cache.check_invariants()


@pytest.mark.parametrize("kind", TREES)
def test_an_insert_that_is_refused_has_split_nothing(kind: type[BasePrefixCache]) -> None:
    cache = window_cache(SMALL, kind)
    insert(cache, list(range(8)), evicted=6)
    key, value = RadixKey(list(range(8))), take(cache, 8, evicted=2)
    wrong: list[dict[str, Any]] = [
        {"value": value[:7], "swa_evicted_seqlen": 2},
        {"value": value, "swa_evicted_seqlen": 2, "prev_prefix_len": 1},
        {"value": value, "swa_evicted_seqlen": 2, "key": RadixKey(list(range(8)), None, 5)},
        {"value": value, "swa_evicted_seqlen": 3},
    ]
    for fields in wrong:
        params = InsertParams(**{"key": key, **fields})
        refused(cache, CacheError, lambda params=params: cache.insert(params))


@pytest.mark.parametrize("kind", TREES)
def test_another_requests_window_data(kind: type[BasePrefixCache]) -> None:
    cache = window_cache(SMALL, kind)
    insert(cache, [1, 2, 3, 4], evicted=4)
    req = PlainRequest("r", [7, 7, 7, 7])
    admit(cache, req)
    theirs = cache.extend_req(req, 4)
    assert theirs is not None
    params = InsertParams(key=RadixKey([1, 2, 3, 4]), value=theirs)
    refused(cache, InvalidIndexError, lambda: cache.insert(params))


def test_a_cache_that_shares_nothing_refuses_what_the_others_do() -> None:
    cache = window_cache(SMALL, ChunkCache)
    value = take(cache, 4)
    short = InsertParams(key=RadixKey([1, 2, 3, 4]), value=value[:3])
    refused(cache, InvalidParamsError, lambda: cache.insert(short))
    nowhere = InsertParams(key=RadixKey([1, 2, 3, 4], None, 5), value=value)
    refused(cache, InvalidParamsError, lambda: cache.insert(nowhere))


@pytest.mark.parametrize(
    ("indices", "dp_rank", "error"),
    [
        ([0, 1], 0, InvalidIndexError),  # free
        ([0, 1, 0, 1], 0, InvalidIndexError),
        ([1.5, 2.5], 0, InvalidIndexError),
        ([-2, -1], 0, InvalidIndexError),
        ([10**6, 10**6 + 1], 0, InvalidIndexError),
        ([0, 1], 5, InvalidParamsError),
        ([0, 1], -1, InvalidParamsError),
    ],
)
def test_window_data_for_full_indices_that_one_does_not_hold(
    indices: Any, dp_rank: int, error: type[CacheError]
) -> None:
    cache = window_cache(SMALL)
    pool = swa_of(cache).swa_allocator
    refused(cache, error, lambda: pool.alloc_for(indices, dp_rank))


def test_window_data_for_the_trees_indices_or_twice() -> None:
    cache = window_cache(SMALL)
    insert(cache, [1, 2, 3, 4], evicted=4)
    pool, own = swa_of(cache).swa_allocator, node_ending(cache, 4).component_data[FULL].value
    assert own is not None
    refused(cache, InvalidIndexError, lambda: pool.alloc_for(own))
    value = np.array(take(cache, 4), np.int32)
    assert "free_for" in refused(cache, InvalidIndexError, lambda: pool.alloc_for(value))
    pool.free_for(value)
    assert pool.translate(value).tolist() == [-1] * 4
    cache.token_allocator.free(value)
    cache.check_invariants()


def test_full_indices_that_were_freed_while_they_were_mapped() -> None:
    """A caller's mistake costs the caller's window data, and leads nobody else anywhere."""
    cache = window_cache(SMALL)
    device, pool = WindowDevice(cache), swa_of(cache).swa_allocator
    value = np.array(take(cache, 4), np.int32)
    lost = pool.translate(value)
    cache.token_allocator.free(value)
    req = PlainRequest("r", list(range(100, 108)))
    assert device.admit(req) is not None and device.prefill(req)
    pool.free(lost)
    assert device.decode(req, [1, 2])
    cache.cache_finished_req(req)
    device.check()


def test_more_tokens_at_once_than_window_pools_are_sized_for() -> None:
    cache = window_cache(SMALL)
    req = PlainRequest("r", list(range(12)))
    admit(cache, req)
    message = refused(cache, InvalidParamsError, lambda: cache.extend_req(req, 5))
    assert "5 at once" in message and "4" in message
    assert cache.extend_req(req, 4) is not None


def test_a_pool_that_is_short_in_the_second_component_leaves_the_first_as_it_was() -> None:
    cache = window_cache(SMALL)
    req = PlainRequest("r", list(range(12)))
    admit(cache, req)
    before = cache.digest()
    pool = swa_of(cache).allocator
    with failing_allocation(pool, 1), failing_allocation(pool, 1):  # and again when it tries anew
        assert cache.extend_req(req, 4) is None
    assert cache.digest() == before
    cache.check_invariants()


def test_a_step_that_no_window_pool_holds_is_refused_before_anything_is_evicted() -> None:
    cache = window_cache(Sizes(8, 8, window=1, extend=3))
    insert(cache, [1, 2, 3, 4])
    req = PlainRequest("r", [9] * 8)
    admit(cache, req)
    refused(cache, InvalidParamsError, lambda: cache.extend_req(req, 6))
    assert match(cache, [1, 2, 3, 4]).hit_len == 4


def test_a_list_is_freed_with_its_mapping() -> None:
    cache = window_cache(SMALL)
    full, pool = cache.token_allocator.alloc(2), swa_of(cache).swa_allocator
    assert full is not None
    windows = pool.alloc_for(full)
    assert windows is not None
    pool.free(windows.tolist())  # pyright: ignore[reportArgumentType]
    assert pool.translate(full).tolist() == [-1, -1]
    assert pool.available_size(0) == pool.capacity


def test_indices_of_tokens_that_have_none() -> None:
    cache = window_cache(SMALL)
    req = PlainRequest("r", list(range(12)))
    admit(cache, req)
    cache.extend_req(req, 4)
    for stop in (5, -1, 1.5, "a"):
        refused(cache, InvalidParamsError, lambda stop=stop: cache.token_indices(req, stop))
    assert [len(part) for part in cache.token_indices(req, 4).values()] == [4, 4]


def test_indices_that_end_before_the_window() -> None:
    cache = window_cache(Sizes(64, 64, page_size=2, window=2, extend=4))
    device = WindowDevice(cache)
    req = PlainRequest("r", list(range(20)))
    assert device.admit(req) is not None and device.prefill(req)
    assert cache.token_indices(req, 3)[SWA].tolist() == [-1] * 3


def test_a_priority_that_went_wrong_meanwhile_does_not_keep_the_request() -> None:
    cache = window_cache(SMALL)
    req = PlainRequest("r", list(range(10)))
    admit(cache, req)
    cache.extend_req(req, 4)
    cache.advance_req(req, 4)
    req.priority = None  # type: ignore[assignment]
    refused(cache, InvalidParamsError, lambda: cache.cache_unfinished_req(req))
    cache.abort_req(req)
    cache.check_invariants()
    assert cache.available_size(FULL) == 16


def test_a_match_that_leaves_nothing_to_compute() -> None:
    cache = window_cache(SMALL)
    insert(cache, [1, 2, 3, 4])
    req = PlainRequest("r", [1, 2, 3, 4])
    everything = match(cache, req.token_ids)
    refused(cache, InvalidParamsError, lambda: cache.admit_req(req, everything, 0))


def test_giving_a_part_up_twice_changes_nothing_the_second_time() -> None:
    cache = window_cache(SMALL)
    node = insert(cache, [1, 2, 3, 4]).node
    first, second = cache.inc_lock_ref(node), cache.inc_lock_ref(node)
    cache.release_early(first, SWA)
    before = cache.digest()
    cache.release_early(first, SWA)
    assert cache.digest() == before
    assert [number for number, *_ in cache.receipts()] == [first.receipt_id, second.receipt_id]


def test_nothing_is_no_node() -> None:
    cache = window_cache(SMALL)
    refused(cache, CacheError, lambda: cache.inc_lock_ref(None))  # type: ignore[arg-type]


# -- what the two trees must do alike ------------------------------------------------------------


@pytest.mark.parametrize("kind", TREES)
def test_what_cascades_counts_towards_the_other_quota(kind: type[BasePrefixCache]) -> None:
    cache = window_cache(Sizes(64, 64, window=4), kind)
    for start in (0, 100, 200):
        insert(cache, list(range(start, start + 4)))
    result = cache.evict(EvictParams(num_tokens=4, swa_num_tokens=4))
    assert (result.num_tokens_evicted, result.swa_num_tokens_evicted) == (4, 4)


def test_windows_of_another_rank_do_not_keep_a_request_out() -> None:
    cache = window_cache(Sizes(100, 36, window=8, extend=8, dp_size=2))
    device = WindowDevice(cache)
    other = PlainRequest("a", list(range(12)), dp_rank=1)
    assert device.admit(other) is not None and device.forward(other, 8)
    req = PlainRequest("b", list(range(60)))
    insert(cache, list(range(100, 116)))
    lock = cache.inc_lock_ref(node_ending(cache, 116 - 100))
    assert cache.available_size(SWA) + cache.evictable_size(SWA) == 36 - 9
    assert device.admit(req, num_tokens=60) is not None
    cache.dec_lock_ref(lock.node, lock.to_dec_params())


def test_the_lock_of_a_published_window_ends_with_the_publishing() -> None:
    """No forward is needed first: what is behind the window can be evicted at once."""
    cache = window_cache(Sizes(64, 64, window=4, extend=16))
    device = WindowDevice(cache)
    req = PlainRequest("r", list(range(16)))
    assert device.admit(req) is not None and device.forward(req, 16)
    cache.cache_unfinished_req(req)
    assert (cache.protected_size(SWA), cache.evictable_size(SWA)) == (5, 0)
    assert device.decode(req, [1, 2, 3, 4, 5])
    assert cache.protected_size(SWA) == 0 and evict_swa(cache, 99).swa_num_tokens_evicted == 5


def test_check_fits_counts_the_window_that_is_locked_as_well() -> None:
    """Window, page, chunk and a page are owned, a window and a page are locked."""
    window_cache(Sizes(1000, 19, window=4, extend=8)).check_fits(500)
    with pytest.raises(CacheError, match="needs 19 SWA"):
        window_cache(Sizes(1000, 18, window=4, extend=8)).check_fits(500)


def test_a_split_keeps_the_count_of_hits_on_both_halves() -> None:
    cache = window_cache(Sizes(window=8))
    for component in cache.components:
        component.policy = LFU()
    insert(cache, [1, 2, 3, 4])
    for _ in range(3):
        match(cache, [1, 2, 3, 4])
    upper = match(cache, [1, 2]).best_match_node
    below = node_ending(cache, 4)
    assert [node.component_data[SWA].hit_count for node in (upper, below)] == [4, 3]
