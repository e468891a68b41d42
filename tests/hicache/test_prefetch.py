"""`prefetch_req`: what stays while room is made, what is counted, and which matches are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.hicache.test_events import FULL, RECURRENT, Script, tell
from tests.recurrent.fake_device import hybrid_cache
from tests.support import PlainRequest, full_cache, match, run_tokens
from uhrc_core.cache.host_tier import PrefetchEvent
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import EvictParams, InsertParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.errors import InvalidParamsError


def store(
    cache: UnifiedRadixCache, tokens: list[int], snapshot_at: int | None = None, priority: int = 0
) -> None:
    """Tokens in the tree, with a snapshot after some of them."""
    value = cache.token_allocator.alloc(len(tokens))
    assert value is not None
    fields: dict[str, Any] = {}
    if snapshot_at is not None:
        slot = cache.components[1].allocator.alloc(1)
        assert slot is not None
        fields = {"recurrent_value": int(slot[0]), "recurrent_seqlen": snapshot_at}
    params = InsertParams(key=RadixKey(tokens), value=value, priority=priority, **fields)
    result = cache.insert(params)
    cache.token_allocator.free(value[: result.prefix_len])


def test_full_data_beyond_the_hit_stays_while_room_is_made_for_the_rest() -> None:
    """The hit ends at the snapshot; the tokens behind it are older than everything else."""
    cache = hybrid_cache(num_pages=8)
    store(cache, [1, 2, 3, 4], snapshot_at=2)
    store(cache, [7, 8, 9, 10], snapshot_at=4)
    match(cache, [7, 8, 9, 10])
    script = tell(cache, Script(claims=6))
    req = PlainRequest("r", [1, 2, 3, 4, 5, 6, 7])
    found = cache.match_req(req)
    assert (found.hit_len, found.full_hit_length, found.host_hit_length) == (2, 4, 4)
    assert cache.prefetch_req(req, found).hit_len == 6
    event = script.heard[-1]
    assert isinstance(event, PrefetchEvent)
    assert [(span.kind, span.start, span.stop) for span in event.spans] == [
        (FULL, 4, 6),
        (RECURRENT, 6, 6),
    ]
    assert cache.peek_prefix_len(RadixKey([7, 8, 9, 10])) == 0
    cache.check_invariants()


def test_the_hits_snapshot_stays_while_a_slot_is_found_for_a_deeper_one() -> None:
    cache = hybrid_cache(num_pages=16, num_slots=2)
    store(cache, [1, 2, 3, 4], snapshot_at=2)
    store(cache, [7, 8], snapshot_at=2)
    match(cache, [7, 8])
    tell(cache, Script(claims=4))
    req = PlainRequest("r", [1, 2, 3, 4, 5])
    assert cache.prefetch_req(req, cache.match_req(req)).hit_len == 4
    assert cache.peek_prefix_len(RadixKey([1, 2, 9])) == 2
    assert cache.peek_prefix_len(RadixKey([7, 8])) == 0


def test_a_state_before_the_end_of_what_the_device_has() -> None:
    cache = hybrid_cache()
    store(cache, [1, 2, 3, 4, 5], snapshot_at=1)
    tell(cache, Script(claims=3))
    req = PlainRequest("r", [1, 2, 3, 4, 5, 6])
    found = cache.match_req(req)
    assert (found.hit_len, found.full_hit_length, found.host_hit_length) == (1, 5, 2)
    assert cache.prefetch_req(req, found).hit_len == 3
    assert cache.stats().prefetched_num_tokens == 2
    cache.check_invariants()


def test_what_is_brought_back_has_the_requests_priority() -> None:
    cache = full_cache()
    tell(cache, Script(claims=2))
    req = PlainRequest("r", [1, 2, 3], priority=4)
    assert cache.prefetch_req(req, cache.match_req(req)).hit_len == 2
    assert [node.priority for node in cache.nodes()[1:]] == [4]


def test_a_prefix_that_is_inside_an_edge_now_keeps_its_hit() -> None:
    """Since the match, others have made one long edge of it."""
    cache = full_cache(num_pages=8)
    script = tell(cache, Script(claims=4))
    req = PlainRequest("r", [1, 2, 3, 4, 5])
    found = cache.match_req(req)
    script.claims = 0
    store(cache, [1, 2, 9, 9])
    store(cache, [8, 8, 8, 8])
    assert cache.prefetch_req(req, found).hit_len == 4
    cache.check_invariants()


def mutated(**fields: Any) -> Callable[[Any], None]:
    def change(match: Any) -> None:
        for name, value in fields.items():
            setattr(match, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (mutated(), [50, 51, 52]),
        (mutated(), [1, 2, 3]),
        (mutated(host_hit_length=3), None),
        (mutated(host_hit_length=1.5), None),
        (mutated(host_hit_length=True), None),
        (mutated(host_hit_length="x"), None),
        (mutated(host_hit_length=-2), None),
    ],
)
def test_a_match_that_is_not_the_requests_changes_nothing(
    change: Callable[[Any], None], other: list[int] | None
) -> None:
    cache = full_cache(num_pages=8, page_size=2)
    tell(cache, Script(claims=6))
    store(cache, [1, 2])
    req = PlainRequest("r", [1, 2, 3, 4, 5, 6, 7])
    found = cache.match_req(req)
    change(found)
    before = cache.digest()
    asked = req if other is None else PlainRequest("s", other)
    with pytest.raises(InvalidParamsError):
        cache.prefetch_req(asked, found)
    assert cache.digest() == before
    cache.check_invariants()


def test_a_priority_that_is_none() -> None:
    cache = full_cache()
    tell(cache, Script(claims=2))
    req = PlainRequest("r", [1, 2, 3])
    found = cache.match_req(req)
    req.priority = "high"  # type: ignore[assignment]
    with pytest.raises(InvalidParamsError, match="priority"):
        cache.prefetch_req(req, found)


class Interrupted(Script):
    """Ctrl-C arrives in the middle of it."""

    def prefetch(self, event: PrefetchEvent) -> bool:
        raise KeyboardInterrupt

    def write_back(self, event: Any) -> None:
        raise KeyboardInterrupt

    def write_through(self, event: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_in_a_hook_leaves_everything_in_its_place() -> None:
    cache = full_cache(num_pages=8)
    tell(cache, Interrupted(claims=2))
    req = PlainRequest("r", [1, 2, 3])
    found = cache.match_req(req)
    with pytest.raises(KeyboardInterrupt):
        cache.prefetch_req(req, found)
    cache.check_invariants()
    store(cache, [7, 8])
    with pytest.raises(KeyboardInterrupt):
        cache.evict(EvictParams(num_tokens=1))
    cache.check_invariants()
    found.host_hit_length = 0
    assert cache.admit_req(req, found, 3) is not None and run_tokens(cache, req, 3)
    with pytest.raises(KeyboardInterrupt):
        cache.cache_finished_req(req)
    assert cache.live_requests() == () and cache.num_receipts() == 0
    cache.check_invariants()
