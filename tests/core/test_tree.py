"""The tree with FULL alone: match, peek, insert, split, namespaces, miss reasons, events."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.support import (
    PlainRequest,
    admit,
    full_cache,
    insert,
    match,
    paged_tokens,
    run_tokens,
)
from uhrc_core.cache.events import CacheEvent, EventKind, EventLog
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import ComponentData
from uhrc_core.cache.params import EvictParams, InsertParams, MissReason
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.errors import InvalidParamsError, InvariantError, RequestError
from uhrc_core.kinds import ComponentType

FULL = ComponentType.FULL

SPLIT_RULES = {
    "value": "cut at the split",
    "lock_ref": "copied to the new parent",
    "last_access_time": "copied to the new parent",
    "hit_count": "copied to the new parent",
    "host_value": "stays with the child (always None here)",
    "host_lock_ref": "stays with the child (always 0 here)",
    "queued": "stays with the child",
}


def test_every_slot_field_has_a_split_rule_and_split_keeps_it() -> None:
    assert set(ComponentData.__slots__) == set(SPLIT_RULES)
    cache = full_cache()
    node = insert(cache, [1, 2, 3, 4]).node
    for _ in range(3):
        match(cache, [1, 2, 3, 4])
    receipt = cache.inc_lock_ref(node)
    before, queued = node.component_data[FULL].value, node.component_data[FULL].queued
    assert before is not None and queued
    upper = match(cache, [1, 2, 9]).best_match_node
    above, below = upper.component_data[FULL], node.component_data[FULL]
    assert node.parent is upper and (upper.end, node.end) == (2, 4)
    assert above.value is not None and below.value is not None
    assert above.value.tolist() == before[:2].tolist()
    assert below.value.tolist() == before[2:].tolist()
    assert above.lock_ref == below.lock_ref == 1
    assert (above.hit_count, below.hit_count) == (4, 3)  # this match hit the front alone
    assert above.last_access_time == below.last_access_time + 1
    assert (above.queued, below.queued) == (False, True)
    assert above.host_value is below.host_value is None
    assert above.host_lock_ref == below.host_lock_ref == 0
    cache.dec_lock_ref(node, receipt.to_dec_params())
    cache.check_invariants()


def test_split_values_do_not_keep_the_whole_edge_alive() -> None:
    cache = full_cache()
    node = insert(cache, [1, 2, 3, 4]).node
    upper = match(cache, [1, 2]).best_match_node
    for part in (node, upper):
        value = part.component_data[FULL].value
        assert value is not None and value.base is None


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_hits_are_whole_pages(page_size: int) -> None:
    cache = full_cache(8, page_size)
    tokens = paged_tokens([1, 2, 3], page_size)
    insert(cache, tokens)
    for length in (0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, 3 * page_size):
        expected = length // page_size * page_size
        assert cache.peek_prefix_len(RadixKey(tokens[:length])) == expected
        result = match(cache, tokens[:length])
        assert result.hit_len == result.full_hit_length == expected
        assert result.host_hit_length == 0 and result.recurrent_cow_src is None
        assert result.best_match_node is result.last_device_node is result.last_host_node
        cache.check_invariants()


def test_a_fork_inside_a_page_hits_the_pages_before_it() -> None:
    cache = full_cache(8, 4)
    insert(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert match(cache, [1, 2, 3, 4, 5, 6, 9, 9]).hit_len == 4
    assert insert(cache, [1, 2, 3, 4, 5, 6, 9, 9]).prefix_len == 4
    assert match(cache, [1, 2, 3, 4, 5, 6, 7, 8]).hit_len == 8


def test_insert_answers_what_was_there_and_keeps_its_own_indices() -> None:
    cache = full_cache()
    insert(cache, [1, 2, 3])
    owned = match(cache, [1, 2, 3]).device_indices.tolist()
    value = cache.token_allocator.alloc(5)
    assert value is not None
    result = cache.insert(InsertParams(key=RadixKey([1, 2, 3, 4, 5]), value=value))
    assert (result.prefix_len, result.inserted_len, result.node.end) == (3, 5, 5)
    hit = match(cache, [1, 2, 3, 4, 5]).device_indices
    assert hit.tolist() == owned + value[3:].tolist()
    cache.check_invariants(held={FULL: [value[:3]]})


def test_a_prefix_of_a_known_prompt_and_the_other_order() -> None:
    for first, second in (([1, 2, 3], [1, 2]), ([1, 2], [1, 2, 3])):
        cache = full_cache()
        insert(cache, first)
        insert(cache, second)
        assert match(cache, [1, 2, 3, 4]).hit_len == 3
        cache.check_invariants()


def test_an_empty_key_hits_and_inserts_nothing() -> None:
    cache = full_cache(page_size=16)
    assert match(cache, []).hit_len == 0
    assert insert(cache, []).inserted_len == 0
    assert insert(cache, list(range(15))).inserted_len == 0
    assert cache.nodes()[1:] == []


def test_nothing_is_shared_between_namespaces() -> None:
    cache = full_cache(32, dp_size=2)
    spaces = [None, "", ("a", "bc"), ("ab", "c"), 7, "7"]
    for space in spaces:
        assert match(cache, [1, 2, 3], space).hit_len == 0
        insert(cache, [1, 2, 3], space)
    indices = [match(cache, [1, 2, 3], space).device_indices.tolist() for space in spaces]
    assert sorted(i for part in indices for i in part) == list(range(3 * len(spaces)))
    assert cache.peek_prefix_len(RadixKey([1, 2, 3], None, 1)) == 0
    cache.check_invariants()


def test_miss_reasons_tell_evicted_from_never_seen() -> None:
    cache = full_cache()
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4])
    assert match(cache, [1, 2, 3]).miss_reason is None
    assert match(cache, [9]).miss_reason is MissReason.NO_PREFIX
    cache.evict(EvictParams(num_tokens=1))
    assert match(cache, [1, 2, 4]).miss_reason is MissReason.FULL_EVICTED
    assert match(cache, [1, 2, 3, 5]).miss_reason is MissReason.NO_PREFIX
    insert(cache, [1, 2, 4])
    assert match(cache, [1, 2, 4]).miss_reason is None
    stats = cache.stats()
    assert stats.miss_reasons[MissReason.NO_PREFIX] == 2
    assert stats.miss_reasons[MissReason.FULL_EVICTED] == 1
    assert (stats.match_count, stats.query_num_tokens, stats.hit_num_tokens) == (5, 14, 11)
    assert (stats.insert_count, stats.inserted_num_tokens) == (3, 5)
    assert stats.evicted.num_tokens_evicted == 1


def test_peek_changes_nothing_and_agrees_with_match() -> None:
    cache = full_cache()
    insert(cache, [1, 2, 3, 4])
    key = RadixKey([1, 2, 9])
    before, stats = cache.digest(), cache.stats()
    assert cache.peek_prefix_len(key) == 2
    assert cache.digest() == before and cache.stats() == stats
    assert match(cache, [1, 2, 9]).hit_len == 2
    assert cache.digest() != before


def test_returned_indices_are_the_callers_own() -> None:
    cache = full_cache()
    insert(cache, [1, 2, 3])
    before = cache.digest()
    cache_view = match(cache, [1, 2, 3]).device_indices
    cache_view[:] = 99
    assert match(cache, [1, 2, 3]).device_indices.tolist() == [0, 1, 2]
    assert cache.digest() != before  # the matches moved the clock, the values did not change
    cache.check_invariants()


def _mirror(events: list[CacheEvent]) -> dict[int, tuple[int, bytes]]:
    nodes: dict[int, tuple[int, bytes]] = {}
    for event in events:
        if event.kind is EventKind.RESET:
            nodes.clear()
        elif event.kind is EventKind.REMOVED:
            del nodes[event.node_id]
        else:
            assert event.key is not None
            if event.kind is EventKind.GROWN:
                parent, data = nodes[event.node_id]
                nodes[event.node_id] = (parent, data + event.key.data)
            elif event.kind is EventKind.STORED:
                nodes[event.node_id] = (event.parent_id, event.key.data)
            else:
                parent, data = nodes[event.node_id]
                nodes[event.parent_id] = (parent, event.key.data)
                nodes[event.node_id] = (event.parent_id, data[len(event.key.data) :])
    return nodes


def test_events_rebuild_the_tree_elsewhere() -> None:
    cache = full_cache(64)
    rng = np.random.default_rng(5)
    events = cache.take_events()
    assert events == [CacheEvent(EventKind.RESET)]
    for step in range(60):
        insert(cache, rng.integers(0, 2, int(rng.integers(1, 8))).tolist())
        req = PlainRequest(str(step), [step, *rng.integers(0, 2, 6).tolist()])
        hit = admit(cache, req)
        for upto in () if hit else (4, 7):
            if run_tokens(cache, req, upto):
                cache.cache_unfinished_req(req)
        cache.cache_finished_req(req)
        match(cache, rng.integers(0, 2, 4).tolist())
        cache.evict(EvictParams(num_tokens=30, shortfall=True))
        events += cache.take_events()
        nodes = cache.nodes()[1:]
        parents = {n.id: n.parent.id for n in nodes if n.parent is not None}
        assert _mirror(events) == {n.id: (parents[n.id], n.key.data) for n in nodes}
    assert cache.take_events() == []
    assert {e.kind for e in events} == set(EventKind)


def test_a_reader_that_comes_late_or_falls_behind_gets_the_whole_tree() -> None:
    cache = full_cache(64)
    for step in range(8):
        insert(cache, [1, 2, step])
    late = cache.take_events()
    assert late[0].kind is EventKind.RESET and len(late) == 10
    assert set(_mirror(late)) == {node.id for node in cache.nodes()[1:]}
    log = EventLog(num_tokens_max=3)
    assert log.take([]) == [CacheEvent(EventKind.RESET)]
    log.add(EventKind.STORED, 1, 0, RadixKey([1, 2, 3]))
    assert len(log.take([])) == 1
    log.add(EventKind.STORED, 2, 0, RadixKey([1, 2, 3, 4]))
    assert log.take([]) == [CacheEvent(EventKind.RESET)]


def test_a_snapshot_for_a_cache_without_recurrent_data_is_refused() -> None:
    cache = full_cache()
    value = cache.token_allocator.alloc(2)
    assert value is not None
    with pytest.raises(InvalidParamsError, match=r"no <ComponentType.RECURRENT"):
        cache.insert(
            InsertParams(key=RadixKey([1, 2]), value=value, recurrent_value=7, recurrent_seqlen=2)
        )


DIGEST_PROGRAM = """
import uhrc_core
from tests.support import *
cache = full_cache(16, 2, dp_size=2)
for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8]):
    for space in (None, "a", ("x", 1)):
        insert(cache, tokens, space)
        cache.evict(uhrc_core.EvictParams(num_tokens=8, shortfall=True))
        match(cache, tokens[:2], space)
print(cache.digest())
"""


def test_digest_is_equal_in_every_process_whatever_its_hash_seed() -> None:
    def run(seed: str) -> str:
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)}
        command = [sys.executable, "-c", DIGEST_PROGRAM]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    assert run("1") == run("2") != ""


def test_check_invariants_sees_damage_and_prints_the_state() -> None:
    def broken(damage: str) -> str:
        cache = full_cache(8)
        node = insert(cache, [1, 2]).node
        leaf = insert(cache, [1, 2, 3]).node
        data = node.component_data[FULL]
        assert data.value is not None
        exec(damage, {"cache": cache, "node": node, "leaf": leaf, "data": data})
        with pytest.raises(InvariantError) as error:
            cache.check_invariants()
        assert "node 1 [0:2)" in str(error.value)
        return str(error.value)

    assert "no FULL value" in broken("data.value = None")
    assert "value has 1 indices" in broken("data.value = data.value[:1]")
    assert "exactly one owner" in broken("data.value[0] = 7")
    assert "lock_ref" in broken("leaf.component_data[0].lock_ref = 1")
    assert "used at" in broken("data.last_access_time = 0")
    assert "host fields" in broken("data.host_lock_ref = 1")
    assert "recount finds" in broken("cache.token_allocator.ledger.counts[0].evictable -= 1")
    assert "exactly one owner" in broken("cache.token_allocator.free_pages(0)[0] = 0")
    assert "registered nodes" in broken("node.children.clear()")
    assert "queued candidates" in broken("cache.components[0].queues[0].clear()")


def test_pretty_print_shows_each_node_once() -> None:
    cache = full_cache(8)
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4])
    lines = cache.pretty_print().splitlines()
    assert lines[0].startswith("FULL rank 0: RankCounts(free=4, active=0, evictable=4")
    assert [line.index("<node") for line in lines[1:]] == [0, 2, 2]


def test_a_lower_priority_leaves_a_node_its_higher_one() -> None:
    cache = full_cache()
    for priority in (5, 1):
        value = cache.token_allocator.alloc(2)
        assert value is not None
        key = RadixKey([1, 2])
        done = cache.insert(InsertParams(key=key, value=value, priority=priority))
        cache.token_allocator.free(value[: done.prefix_len])
    assert cache.nodes()[1].priority == 5


def test_a_divergence_inside_an_edge_is_no_evicted_prefix() -> None:
    cache = full_cache()
    insert(cache, [1, 4, 4])
    insert(cache, [1, 4, 4, 3])
    cache.evict(EvictParams(num_tokens=1))  # token 3 below that edge is remembered as evicted
    assert match(cache, [1, 4, 3]).miss_reason is MissReason.NO_PREFIX
    assert match(cache, [1, 4, 4, 3]).miss_reason is MissReason.FULL_EVICTED


def test_the_digest_covers_the_clock_and_what_live_requests_hold() -> None:
    cache = full_cache()
    before = cache.digest()
    match(cache, [])
    assert cache.digest() != before


def test_reset_forgets_everything() -> None:
    cache = full_cache(8)
    insert(cache, [1, 2, 3])
    cache.reset()
    assert cache.peek_prefix_len(RadixKey([1, 2, 3])) == 0
    assert cache.available_size(FULL) == 8 and cache.stats().insert_count == 0
    assert cache.digest() == full_cache(8).digest()
    cache.check_invariants()


def test_reset_waits_for_locks_and_reuses_no_receipt_or_node_number() -> None:
    cache = full_cache(8)
    node = insert(cache, [1, 2]).node
    lock = cache.inc_lock_ref(node)
    with pytest.raises(RequestError, match=r"1 lock\(s\) held"):
        cache.reset()
    cache.dec_lock_ref(node, lock.to_dec_params())
    cache.reset()
    again = insert(cache, [1, 2]).node
    assert again.id != node.id and cache.inc_lock_ref(again).receipt_id != lock.receipt_id


def test_a_deep_tree_is_printed_in_linear_space() -> None:
    cache = full_cache(2000)
    for length in range(1, 500):
        insert(cache, list(range(length)))
    assert len(cache.pretty_print()) < 500 * 200


def test_evicted_nodes_are_freed_without_the_cycle_collector() -> None:
    import gc
    import weakref

    class Edge(RadixKey):
        __slots__ = ("__weakref__",)

    cache: UnifiedRadixCache = full_cache(8)
    insert(cache, [1, 2])
    node = cache.nodes()[1]
    node.key.__class__ = RadixKey
    gc.disable()
    try:
        edge = Edge(node.key.tokens)
        node.key, ref = edge, weakref.ref(edge)
        del edge, node
        cache.take_events()
        cache.evict(EvictParams(num_tokens=2))
        assert ref() is None
    finally:
        gc.enable()
