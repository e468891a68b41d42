"""Locks: receipts, two holders, splits under a lock."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.support import full_cache, insert, match
from uhrc_core.cache.params import DecLockRefParams, EvictParams
from uhrc_core.errors import ReceiptError, StaleNodeError
from uhrc_core.kinds import ComponentType

FULL = ComponentType.FULL


def test_a_lock_covers_the_path_to_the_root_once_per_holder() -> None:
    cache = full_cache()
    root_side = insert(cache, [1, 2]).node
    leaf = insert(cache, [1, 2, 3]).node
    locks = [cache.inc_lock_ref(leaf), cache.inc_lock_ref(leaf), cache.inc_lock_ref(root_side)]
    assert [n.component_data[FULL].lock_ref for n in (root_side, leaf)] == [3, 2]
    assert cache.protected_size(FULL) == 3
    for lock in locks:
        cache.dec_lock_ref(lock.node, lock.to_dec_params())
        cache.check_invariants()
    assert (cache.protected_size(FULL), cache.evictable_size(FULL)) == (0, 3)


def test_two_holders_never_release_each_other_in_any_interleaving() -> None:
    steps = ["lock a", "lock b", "split", "evict", "unlock a", "unlock b"]
    for order in permutations(steps):
        if order.index("unlock a") < order.index("lock a"):
            continue
        if order.index("unlock b") < order.index("lock b"):
            continue
        cache = full_cache()
        node = insert(cache, [1, 2, 3]).node
        held = {}
        for step in order:
            verb, *who = step.split()
            if verb == "lock":
                if cache.peek_prefix_len(node.key) != 3 and node.parent is None:
                    break  # evicted before anybody held it
                held[who[0]] = cache.inc_lock_ref(node)
            elif verb == "unlock":
                lock = held.pop(who[0])
                cache.dec_lock_ref(lock.node, lock.to_dec_params())
            elif verb == "split":
                match(cache, [1, 2])
            else:
                cache.evict(EvictParams(num_tokens=3))
            cache.check_invariants()
            if held:
                assert match(cache, [1, 2, 3]).hit_len == 3, order


def test_a_split_under_a_lock_is_released_with_it() -> None:
    cache = full_cache()
    node = insert(cache, [1, 2, 3, 4]).node
    lock = cache.inc_lock_ref(node)
    upper = match(cache, [1, 2]).best_match_node
    assert upper.component_data[FULL].lock_ref == 1
    cache.dec_lock_ref(node, lock.to_dec_params())
    assert upper.component_data[FULL].lock_ref == node.component_data[FULL].lock_ref == 0
    assert cache.evictable_size(FULL) == 4


def test_wrong_releases_raise_and_change_nothing() -> None:
    cache = full_cache()
    node, other = insert(cache, [1, 2]).node, insert(cache, [3]).node
    first, second = cache.inc_lock_ref(node), cache.inc_lock_ref(node)
    cache.dec_lock_ref(node, first.to_dec_params())
    before = cache.digest()
    for anchor, receipt, names in (
        (node, first.to_dec_params(), "not outstanding"),
        (other, second.to_dec_params(), "was given for"),
        (node, DecLockRefParams(999), "999"),
        (node, DecLockRefParams(-1), "-1"),
    ):
        with pytest.raises(ReceiptError, match=names):
            cache.dec_lock_ref(anchor, receipt)
    assert cache.digest() == before and cache.protected_size(FULL) == 2


def test_a_lost_receipt_leaks_visibly() -> None:
    cache = full_cache()
    cache.inc_lock_ref(insert(cache, [1, 2]).node)
    assert cache.evict(EvictParams(num_tokens=2)).num_tokens_evicted == 0
    assert (cache.protected_size(FULL), cache.num_receipts()) == (2, 1)
    cache.check_invariants()


def test_evicted_nodes_and_nodes_of_other_caches_cannot_be_locked() -> None:
    cache, other = full_cache(), full_cache()
    node, strange = insert(cache, [1]).node, insert(other, [1]).node
    with pytest.raises(StaleNodeError, match="another cache"):
        cache.inc_lock_ref(strange)
    cache.evict(EvictParams(num_tokens=1))
    with pytest.raises(StaleNodeError, match="evicted"):
        cache.inc_lock_ref(node)
    cache.check_invariants()


def test_the_root_can_be_locked_for_an_empty_hit() -> None:
    cache = full_cache()
    lock = cache.inc_lock_ref(match(cache, [5]).best_match_node)
    insert(cache, [5])
    cache.dec_lock_ref(lock.node, lock.to_dec_params())
    assert cache.evictable_size(FULL) == 1
