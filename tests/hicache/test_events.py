"""What a host tier is told in the life of a request, and what it is not."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest

from tests.recurrent.fake_device import FakeDevice, component_of, hybrid_cache
from tests.support import PlainRequest, admit, full_cache, insert, match, run_tokens
from uhrc_core.cache.component import HostNeed
from uhrc_core.cache.host_tier import (
    HiCacheEvent,
    HiCacheHooks,
    HostQuery,
    PrefetchEvent,
    WriteBackEvent,
    WriteThroughEvent,
)
from uhrc_core.cache.key import ExtraKey, RadixKey
from uhrc_core.cache.params import EvictParams, InsertParams, MissReason
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.errors import PluginError
from uhrc_core.kinds import ComponentType
from uhrc_recurrent.holding import TrackPlan

FULL, RECURRENT = ComponentType.FULL, ComponentType.RECURRENT

Spans = list[tuple[str, int, int, list[int]]]


class Script(HiCacheHooks):
    """Lists what it hears; claims the depth it is told to claim."""

    def __init__(self, claims: int = 0, loads: bool = True) -> None:
        self.claims, self.loads = claims, loads
        self.heard: list[object] = []
        self.needs: tuple[HostNeed, ...] | None = None

    def lookup(self, query: HostQuery) -> int:
        self.heard.append(("lookup", len(query.key), query.hit_len))
        if self.claims:
            self.needs = query.needs(self.claims)
        return self.claims

    def prefetch(self, event: PrefetchEvent) -> bool:
        self.heard.append(event)
        return self.loads

    def write_through(self, event: WriteThroughEvent) -> None:
        self.heard.append(event)

    def write_back(self, event: WriteBackEvent) -> None:
        self.heard.append(event)

    def reset(self) -> None:
        self.heard.append("reset")

    def take(self) -> list[object]:
        heard, self.heard = self.heard, []
        return heard


def spans(event: object) -> Spans:
    assert isinstance(event, HiCacheEvent)
    return [(s.kind.name, s.start, s.stop, s.indices.tolist()) for s in event.spans]


def tell(cache: UnifiedRadixCache, script: Script | None = None) -> Script:
    script = script or Script()
    cache.attach_hicache(script, {FULL: 2.5, RECURRENT: 100.0})
    return script


def serve(cache: UnifiedRadixCache, tokens: list[int], extra_key: ExtraKey = None) -> None:
    req = PlainRequest("r", tokens, extra_key)
    assert admit(cache, req) is not None
    assert run_tokens(cache, req, len(tokens))
    cache.cache_finished_req(req)


def chain(cache: UnifiedRadixCache, num_nodes: int) -> None:
    """A prefix of so many nodes, two tokens each."""
    for stop in range(2, 2 * num_nodes + 1, 2):
        serve(cache, list(range(stop)), "lora")


def test_an_event_that_is_kept_names_its_prefix_after_the_tree_has_changed() -> None:
    cache = full_cache()
    chain(cache, 3)
    script = tell(cache)
    cache.evict(EvictParams(num_tokens=6))
    events = [event for event in script.take() if isinstance(event, WriteBackEvent)]
    assert len(cache.nodes()) == 1, "nothing is left but the root"
    assert [event.key for event in events] == [
        RadixKey(list(range(stop)), "lora") for stop in (6, 4, 2)
    ]


def test_a_long_chain_that_nobody_looks_at_is_evicted_without_copying_it() -> None:
    cache = full_cache()
    chain(cache, 4)
    script = tell(cache)
    with patch.object(RadixKey, "joined") as joined:
        cache.evict(EvictParams(num_tokens=8))
        events = [event for event in script.take() if isinstance(event, WriteBackEvent)]
        assert [(event.namespace, event.dp_rank) for event in events] == [(("lora", 0), 0)] * 4
        joined.assert_not_called()
    assert events[0].key is events[0].key and len(events[0].key) == 8


# -- finish --------------------------------------------------------------------------------------


def test_a_finished_request_writes_its_whole_prefix_through() -> None:
    cache = full_cache()
    script = tell(cache)
    serve(cache, [1, 2, 3])
    lookup, event = script.take()
    assert lookup == ("lookup", 2, 0)
    assert isinstance(event, WriteThroughEvent)
    assert (event.start, event.stop, event.namespace, event.dp_rank) == (0, 3, (None, 0), 0)
    assert event.key == RadixKey([1, 2, 3]) and event.kinds == (FULL,)
    assert spans(event) == [("FULL", 0, 3, [0, 1, 2])] and event.num_bytes == 8
    serve(cache, [1, 2, 9])
    *_, event = script.take()
    assert spans(event) == [("FULL", 0, 3, [0, 1, 3])], "two nodes, one span"


def test_whole_pages_are_written_through_and_the_tail_is_not() -> None:
    cache = full_cache(page_size=4)
    script = tell(cache)
    serve(cache, [1, 2, 3, 4, 5, 6])
    *_, event = script.take()
    assert spans(event) == [("FULL", 0, 4, [0, 1, 2, 3])]
    serve(cache, [1, 2, 3])
    assert script.take() == [], "no page, so nothing to ask for and nothing to tell"


def test_a_retracted_request_is_written_through_and_an_aborted_one_is_not() -> None:
    cache = full_cache()
    script = tell(cache)
    for end, told in ((cache.retract_req, 1), (cache.abort_req, 0)):
        req = PlainRequest("r", [5, 6, 7, told])
        admit(cache, req)
        run_tokens(cache, req, 3)
        script.take()
        end(req)
        assert len(script.take()) == told


def test_chunks_of_a_running_request_are_told_when_it_ends() -> None:
    cache = full_cache()
    script = tell(cache)
    req = PlainRequest("r", [1, 2, 3, 4])
    admit(cache, req)
    script.take()
    run_tokens(cache, req, 2)
    cache.cache_unfinished_req(req)
    assert script.take() == []
    run_tokens(cache, req, 4)
    cache.cache_unfinished_req(req)
    cache.cache_finished_req(req)
    (event,) = script.take()
    assert spans(event) == [("FULL", 0, 4, [0, 1, 2, 3])]


def test_every_snapshot_on_the_path_is_written_through() -> None:
    cache = hybrid_cache(num_pages=8, page_size=2, plan=TrackPlan.make(1, 2, 2, 1))
    script = tell(cache)
    device = FakeDevice(cache)
    device.serve([1, 2, 3, 4, 5])
    *_, event = script.take()
    states = [(s.start, s.stop) for s in event.spans if s.kind is RECURRENT]
    assert states == [(2, 2), (4, 4)] and event.kinds == (FULL, RECURRENT)
    assert event.num_bytes == 4 * 2.5 + 2 * 100


# -- evict ---------------------------------------------------------------------------------------


def test_an_evicted_leaf_is_written_back_before_anything_is_freed() -> None:
    cache = full_cache()
    free: list[int] = []

    class Looking(Script):
        def write_back(self, event: WriteBackEvent) -> None:
            free.append(cache.available_size(FULL))
            super().write_back(event)

    script = tell(cache, Looking())
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 7, 8])
    cache.evict(EvictParams(num_tokens=3))
    first, second = script.take()
    assert isinstance(first, WriteBackEvent) and first.key == RadixKey([1, 2, 3])
    assert (first.start, first.stop) == (2, 3) and spans(first) == [("FULL", 2, 3, [2])]
    assert spans(second) == [("FULL", 2, 4, [5, 6])] and second.key == RadixKey([1, 2, 7, 8])
    assert free == [11, 11] and cache.available_size(FULL) == 14


def test_a_leaf_of_a_hybrid_goes_with_its_snapshot_in_one_event() -> None:
    cache = hybrid_cache()
    script = tell(cache)
    FakeDevice(cache).serve([1, 2, 3])
    script.take()
    cache.evict(EvictParams(recurrent_num=1))
    (event,) = script.take()
    assert spans(event) == [("FULL", 0, 3, [0, 1, 2]), ("RECURRENT", 3, 3, [0])]
    assert event.num_bytes == round(7.5) + 100


def test_an_inner_node_loses_its_snapshot_alone() -> None:
    cache = hybrid_cache()
    script = tell(cache)
    device = FakeDevice(cache)
    device.serve([1, 2, 3])
    device.serve([1, 2, 3, 4, 5])
    script.take()
    cache.evict(EvictParams(recurrent_num=1))
    (event,) = script.take()
    assert isinstance(event, WriteBackEvent)
    assert (event.start, event.stop, event.kinds) == (0, 3, (RECURRENT,))
    assert spans(event) == [("RECURRENT", 3, 3, [0])]


def test_ancestors_that_are_left_bare_have_nothing_to_write_back() -> None:
    cache = full_cache()
    script = tell(cache)
    insert(cache, [1])
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    cache.evict(EvictParams(num_tokens=3))
    assert [spans(event)[0][1:3] for event in script.take()] == [(2, 3), (1, 2), (0, 1)]


def test_what_is_locked_is_not_written_back() -> None:
    cache = full_cache()
    script = tell(cache)
    lock = cache.inc_lock_ref(insert(cache, [1, 2]).node)
    cache.evict(EvictParams(num_tokens=9))
    assert script.take() == []
    cache.dec_lock_ref(lock.node, lock.to_dec_params())


def test_events_name_their_namespace_and_rank() -> None:
    cache = full_cache(dp_size=2)
    script = tell(cache)
    key = RadixKey([1, 2], ("lora", "a"), dp_rank=1)
    value = cache.token_allocator.alloc(2, 1)
    assert value is not None
    cache.insert(InsertParams(key=key, value=value))
    cache.evict(EvictParams(num_tokens=2, dp_rank=1))
    (event,) = script.take()
    assert isinstance(event, HiCacheEvent)
    assert event.namespace == (("lora", "a"), 1) and event.dp_rank == 1


def test_sizes_are_unknown_without_a_model() -> None:
    cache = full_cache()
    script = Script()
    cache.attach_hicache(script)
    insert(cache, [1])
    cache.evict(EvictParams(num_tokens=1))
    (event,) = script.take()
    assert isinstance(event, HiCacheEvent) and event.num_bytes is None
    with pytest.raises(ValueError, match="read-only"):
        event.spans[0].indices[0] = 3


# -- arrive --------------------------------------------------------------------------------------


def test_only_an_arrival_asks_and_only_for_what_the_device_lacks() -> None:
    cache = full_cache()
    script = tell(cache)
    insert(cache, [1, 2, 3])
    match(cache, [1, 2, 3, 4])
    cache.peek_prefix_len(RadixKey([1, 2, 3, 4]))
    assert script.take() == []
    cache.match_req(PlainRequest("r", [1, 2, 3, 9]))
    assert script.take() == [], "all but the last token hit"
    cache.match_req(PlainRequest("r", [1, 2, 3, 4, 5]))
    assert script.take() == [("lookup", 4, 3)]


def test_a_host_hit_is_learnt_first_and_then_brought() -> None:
    cache = full_cache()
    script = tell(cache, Script(claims=4))
    insert(cache, [1, 2])
    req = PlainRequest("r", [1, 2, 3, 4, 5, 6])
    found = cache.match_req(req)
    assert (found.hit_len, found.host_hit_length) == (2, 2)
    assert script.needs == (HostNeed(FULL, 2, 4, 2),)
    assert found.best_match_node is found.last_host_node
    script.take()
    brought = cache.prefetch_req(req, found)
    (event,) = script.take()
    assert isinstance(event, PrefetchEvent) and event.key == RadixKey([1, 2, 3, 4])
    assert (event.start, event.stop) == (2, 4) and spans(event) == [("FULL", 2, 4, [2, 3])]
    assert (brought.hit_len, brought.host_hit_length) == (4, 0)
    assert brought.device_indices.tolist() == [0, 1, 2, 3]
    stats = cache.stats()
    assert (stats.match_count, stats.hit_num_tokens, stats.prefetched_num_tokens) == (1, 2, 2)
    assert cache.admit_req(req, brought, 2) is not None
    cache.check_invariants()


def test_a_snapshot_is_asked_for_where_the_hit_would_end() -> None:
    cache = hybrid_cache()
    script = tell(cache)
    FakeDevice(cache).serve([1, 2, 3])
    cache.evict(EvictParams(recurrent_num=1, num_tokens=3))
    script.claims = 4
    req = PlainRequest("r", [1, 2, 3, 4, 5])
    found = cache.match_req(req)
    assert script.needs == (HostNeed(FULL, 0, 4, 4), HostNeed(RECURRENT, 4, 4, 1))
    script.take()
    brought = cache.prefetch_req(req, found)
    (event,) = script.take()
    assert [span[:3] for span in spans(event)] == [("FULL", 0, 4), ("RECURRENT", 4, 4)]
    assert brought.hit_len == 4 and brought.recurrent_cow_src == spans(event)[1][3][0]
    cache.check_invariants()


def test_kv_that_is_still_there_is_not_asked_for_again() -> None:
    cache = hybrid_cache()
    script = tell(cache)
    device = FakeDevice(cache)
    device.serve([1, 2, 3])
    device.serve([1, 2, 3, 4, 5])
    cache.evict(EvictParams(recurrent_num=1))
    script.claims = 3
    req = PlainRequest("r", [1, 2, 3, 8, 9])
    found = cache.match_req(req)
    assert (found.hit_len, found.full_hit_length, found.host_hit_length) == (0, 3, 3)
    assert script.needs == (HostNeed(RECURRENT, 3, 3, 1),)
    script.take()
    assert cache.prefetch_req(req, found).hit_len == 3
    (event,) = script.take()
    assert isinstance(event, HiCacheEvent)
    assert (event.start, event.stop, event.kinds) == (3, 3, (RECURRENT,))


# -- when it cannot be brought -------------------------------------------------------------------


def test_data_that_is_gone_meanwhile_leaves_no_trace() -> None:
    cache = hybrid_cache()
    tell(cache, Script(claims=3, loads=False))
    insert(cache, [1])
    req = PlainRequest("r", [1, 2, 3, 4])
    found = cache.match_req(req)
    brought = cache.prefetch_req(req, found)
    assert (brought.hit_len, brought.host_hit_length) == (0, 0)
    assert (cache.available_size(FULL), cache.available_size(RECURRENT)) == (31, 8)
    assert cache.num_receipts() == 0
    cache.check_invariants()


def test_room_is_made_for_it_but_not_at_the_cost_of_its_own_prefix() -> None:
    cache = full_cache(num_pages=8)
    script = tell(cache, Script(claims=4))
    insert(cache, [1, 2])
    insert(cache, [8, 9, 10, 11, 12])
    match(cache, [8, 9, 10, 11, 12])
    req = PlainRequest("r", [1, 2, 3, 4, 5])
    found = cache.match_req(req)
    script.take()
    assert cache.prefetch_req(req, found).hit_len == 4
    evicted, event = script.take()
    assert isinstance(evicted, WriteBackEvent) and isinstance(event, PrefetchEvent)
    assert evicted.key == RadixKey([8, 9, 10, 11, 12])
    cache.check_invariants()


def test_without_room_the_request_goes_on_with_what_it_has() -> None:
    cache = full_cache(num_pages=4)
    script = tell(cache, Script(claims=4))
    insert(cache, [1, 2])
    lock = cache.inc_lock_ref(insert(cache, [7]).node)
    req = PlainRequest("r", [1, 2, 3, 4, 5])
    found = cache.match_req(req)
    script.take()
    brought = cache.prefetch_req(req, found)
    assert script.take() == [] and brought.hit_len == 2
    cache.dec_lock_ref(lock.node, lock.to_dec_params())
    cache.check_invariants()


def test_a_component_that_finds_no_unit_gives_the_others_theirs_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = hybrid_cache()
    script = tell(cache, Script(claims=2))
    monkeypatch.setattr(component_of(cache), "take_for_host", lambda *_: None)
    req = PlainRequest("r", [1, 2, 3])
    found = cache.match_req(req)
    script.take()
    assert cache.prefetch_req(req, found).hit_len == 0 and script.take() == []
    cache.check_invariants()


def test_a_match_that_others_overtook_is_brought_as_far_as_it_is_missing() -> None:
    cache = full_cache()
    script = tell(cache, Script(claims=2))
    req = PlainRequest("r", [1, 2, 3])
    found = cache.match_req(req)
    insert(cache, [1, 2])
    script.take()
    assert cache.prefetch_req(req, found).hit_len == 2
    assert script.take() == []
    cache.check_invariants()


# -- a tier that fails ---------------------------------------------------------------------------


class Failing(Script):
    def __init__(self, hook: str, claims: int = 0) -> None:
        super().__init__(claims)
        self._hook = hook
        setattr(self, hook, self._fail)

    def _fail(self, *_: object) -> bool:
        self.heard.append(self._hook)
        raise OSError("the disk is gone")


def run_all_hooks(cache: UnifiedRadixCache) -> None:
    req = PlainRequest("r", [1, 2, 3, 4])
    found = cache.prefetch_req(req, cache.match_req(req))
    assert cache.admit_req(req, found, 4) is not None
    assert run_tokens(cache, req, 4)
    cache.cache_finished_req(req)
    cache.check_invariants()
    cache.evict(EvictParams(num_tokens=9))
    cache.check_invariants()
    cache.reset()


@pytest.mark.parametrize("hook", ["lookup", "prefetch", "write_through", "write_back", "reset"])
def test_a_hook_that_raises_costs_the_tier_and_nothing_else(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache, quiet = full_cache(), full_cache()
    script = Failing(hook, claims=2 if hook == "prefetch" else 0)
    tell(cache, script)
    run_all_hooks(cache)
    run_all_hooks(quiet)
    assert cache.digest() == quiet.digest()
    fault = cache.hicache.fault
    assert isinstance(fault, PluginError) and isinstance(fault.__cause__, OSError)
    assert str(fault).startswith(f"hicache: {hook} raised OSError: the disk is gone; the host tier")
    assert [record.getMessage() for record in caplog.records] == [str(fault)]
    assert script.take()[-1] == hook
    run_all_hooks(cache)
    assert script.take() == [], "it is called no more"


def test_keyboard_interrupts_are_not_contained() -> None:
    class Interrupted(Script):
        def lookup(self, query: HostQuery) -> int:
            raise KeyboardInterrupt

    cache = full_cache()
    tell(cache, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        cache.match_req(PlainRequest("r", [1, 2]))
    cache.check_invariants()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (True, "lookup raised TypeError: returned True, which is no int"),
        (None, "lookup raised TypeError: returned None, which is no int"),
        (np.int64(4), "lookup raised TypeError: returned np.int64(4), which is no int"),
        (3, "lookup raised ValueError: depth 3 must be whole pages of 2 beyond the hit of 2"),
        (2, "lookup raised ValueError: depth 2 must be whole pages of 2 beyond the hit of 2"),
        (8, "lookup raised ValueError: depth 8 must be whole pages of 2 beyond the hit of 2"),
        (-2, "lookup raised ValueError: depth -2 must be whole pages"),
    ],
)
def test_an_answer_that_makes_no_sense_is_a_fault(answer: object, message: str) -> None:
    cache = full_cache(page_size=2)
    insert(cache, [1, 2])
    script = Script()
    script.lookup = lambda query: answer  # pyright: ignore
    tell(cache, script)
    assert cache.match_req(PlainRequest("r", [1, 2, 3, 4, 5, 6, 7])).host_hit_length == 0
    assert str(cache.hicache.fault).startswith(f"hicache: {message}")


def test_a_prefetch_that_answers_no_bool_inserts_nothing() -> None:
    cache = full_cache()
    script = Script(claims=2)
    script.prefetch = lambda event: 1  # pyright: ignore
    tell(cache, script)
    req = PlainRequest("r", [1, 2, 3])
    assert cache.prefetch_req(req, cache.match_req(req)).hit_len == 0
    assert "prefetch raised TypeError: returned 1, which is no bool" in str(cache.hicache.fault)
    cache.check_invariants()


# -- no tier -------------------------------------------------------------------------------------


def test_a_tier_that_finds_nothing_changes_nothing() -> None:
    told, quiet = full_cache(), full_cache()
    tell(told)
    calls: list[Callable[[UnifiedRadixCache], object]] = [
        lambda cache: serve(cache, [1, 2, 3]),
        lambda cache: serve(cache, [1, 2, 4, 5], "lora"),
        lambda cache: serve(cache, [1, 2, 3, 6]),
        lambda cache: cache.evict(EvictParams(num_tokens=2)),
        lambda cache: serve(cache, [1, 2]),
    ]
    for call in calls:
        call(told)
        call(quiet)
        assert told.digest() == quiet.digest()
    assert told.stats() == quiet.stats()


def test_without_a_tier_a_prefetch_is_the_match() -> None:
    cache = full_cache()
    req = PlainRequest("r", [1, 2, 3])
    found = cache.match_req(req)
    assert cache.prefetch_req(req, found) is found and found.host_hit_length == 0
    assert found.miss_reason is MissReason.NO_PREFIX
    assert cache.hicache.hooks is None and cache.hicache.fault is None
