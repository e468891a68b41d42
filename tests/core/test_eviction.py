"""Eviction: order, quotas and shortfalls, locks, policies, queue upkeep."""

from __future__ import annotations

import pytest

from tests.support import full_cache, insert, match, paged_tokens
from uhrc_core.cache.eviction import FIFO, LFU, LRU, SLRU, EvictionPolicy, Priority
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import EvictParams, InsertParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.errors import InvalidParamsError
from uhrc_core.kinds import ComponentType

FULL = ComponentType.FULL


def known(cache: UnifiedRadixCache) -> set[int]:
    """Which of the one-page prefixes 0..9 are still there."""
    return {t for t in range(10) if cache.peek_prefix_len(RadixKey([t, t])) == 2}


def test_a_quota_evicts_leaves_until_it_is_met_and_the_last_one_in_part() -> None:
    cache = full_cache(8)
    for token in range(4):
        insert(cache, [token, token])
    assert cache.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 3
    assert known(cache) == {2, 3}
    assert cache.peek_prefix_len(RadixKey([1, 1])) == 1
    assert cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 5
    assert cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 0


def test_only_whole_pages_of_a_tail_go() -> None:
    cache = full_cache(8, 4)
    insert(cache, paged_tokens([1, 2, 3], 4))
    assert cache.evict(EvictParams(num_tokens=5)).num_tokens_evicted == 8
    assert cache.peek_prefix_len(RadixKey(paged_tokens([1, 2, 3], 4))) == 4
    cache.check_invariants()


def test_a_shortfall_stops_as_soon_as_enough_is_free() -> None:
    cache = full_cache(8)
    for token in range(3):
        insert(cache, [token, token])
    assert cache.evict(EvictParams(num_tokens=2, shortfall=True)).num_tokens_evicted == 0
    assert cache.evict(EvictParams(num_tokens=3, shortfall=True)).num_tokens_evicted == 1
    assert cache.available_size(FULL) == 3


def test_leaves_go_before_their_ancestors_and_bare_ancestors_become_candidates() -> None:
    cache = full_cache(8)
    insert(cache, [1, 1])
    insert(cache, [1, 1, 2])
    insert(cache, [1, 1, 3])
    match(cache, [1, 1, 2])
    for left in ([1, 1, 2], [1, 1], [1], []):
        cache.evict(EvictParams(num_tokens=1))
        assert cache.peek_prefix_len(RadixKey([1, 1, 2])) == len(left)
        cache.check_invariants()


def test_locked_paths_stay_and_unlocked_siblings_go() -> None:
    cache = full_cache(8)
    insert(cache, [1, 1, 2])
    node = insert(cache, [1, 1, 3]).node
    receipt = cache.inc_lock_ref(node)
    assert (cache.protected_size(FULL), cache.evictable_size(FULL)) == (3, 1)
    assert cache.evict(EvictParams(num_tokens=8)).num_tokens_evicted == 1
    assert cache.peek_prefix_len(RadixKey([1, 1, 3])) == 3
    cache.dec_lock_ref(node, receipt.to_dec_params())
    assert cache.evict(EvictParams(num_tokens=8)).num_tokens_evicted == 3
    assert cache.nodes()[1:] == []


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (LRU(), [1, 2, 0, 3]),
        (FIFO(), [0, 1, 2, 3]),
        (LFU(), [1, 3, 2, 0]),
        (SLRU(protect_hits=2), [1, 2, 3, 0]),
        (Priority(), [1, 0, 3, 2]),
    ],
)
def test_policies_order_victims(policy: EvictionPolicy, order: list[int]) -> None:
    """Token 0 is hit twice, 2 once (before 0), 3 is inserted last; 2 and 3 have priorities."""
    cache = full_cache(8, policy=policy)
    for token, priority in ((0, 0), (1, 0), (2, 2)):
        value = cache.token_allocator.alloc(2)
        assert value is not None
        key = RadixKey([token, token])
        cache.insert(InsertParams(key=key, value=value, priority=priority))
    match(cache, [2, 2])
    match(cache, [0, 0])
    match(cache, [0, 0])
    value = cache.token_allocator.alloc(2)
    assert value is not None
    cache.insert(InsertParams(key=RadixKey([3, 3]), value=value, priority=1))
    gone: list[int] = []
    while before := known(cache):
        cache.evict(EvictParams(num_tokens=1))
        gone += before - known(cache)
        cache.check_invariants()
    assert gone == order


def test_priority_of_a_longer_prefix_raises_its_ancestors() -> None:
    cache = full_cache(8, policy=Priority())
    insert(cache, [1, 1])
    value = cache.token_allocator.alloc(3)
    assert value is not None
    result = cache.insert(InsertParams(key=RadixKey([1, 1, 2]), value=value, priority=5))
    cache.token_allocator.free(value[: result.prefix_len])
    insert(cache, [3, 3])
    assert [node.priority for node in cache.nodes()[1:]] == [5, 5, 0]
    cache.evict(EvictParams(num_tokens=1))
    assert known(cache) == {1}


def test_eviction_touches_one_rank_only() -> None:
    cache = full_cache(4, dp_size=2)
    for dp_rank in range(2):
        value = cache.token_allocator.alloc(2, dp_rank)
        assert value is not None
        cache.insert(InsertParams(key=RadixKey([1, 1], None, dp_rank), value=value))
    cache.evict(EvictParams(num_tokens=4, dp_rank=1))
    assert cache.peek_prefix_len(RadixKey([1, 1], None, 0)) == 2
    assert cache.peek_prefix_len(RadixKey([1, 1], None, 1)) == 0


def test_units_of_absent_components_and_ranks_are_refused() -> None:
    cache = full_cache(4)
    before = cache.digest()
    for params in (
        {"swa_num_tokens": 1},
        {"recurrent_num": 1},
        {"num_tokens": 1, "dp_rank": 1},
        {"num_tokens": -1},
        {"num_tokens": 1.0},
        {"num_token": 1},
    ):
        with pytest.raises(InvalidParamsError):
            cache.evict(EvictParams(**params))
    assert cache.digest() == before


def test_queues_do_not_outgrow_the_tree() -> None:
    """A leaf that is deleted on the side, or locked, must not leave its entry behind for ever."""
    cache = full_cache(8)
    for round_ in range(2000):
        node = insert(cache, [round_]).node
        receipt = cache.inc_lock_ref(node)
        cache.dec_lock_ref(node, receipt.to_dec_params())
        cache.evict(EvictParams(num_tokens=4, shortfall=True))
    assert sum(len(queue) for queue in cache.components[0].queues) <= 8
