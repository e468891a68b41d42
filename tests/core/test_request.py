"""Life of a request: admission, publishing, leaving by every door at every step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support import PlainRequest, admit, full_cache, insert, match, paged_tokens, run_tokens
from uhrc_core.cache.holding import RequestState
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import EvictParams, InsertParams, MatchResult, MissReason
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.errors import (
    InvalidIndexError,
    InvalidKeyError,
    InvalidParamsError,
    RequestError,
    RequestTooLargeError,
    StaleNodeError,
)
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_full.component import FullHolding

FULL = ComponentType.FULL


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_same_prompt_three_times(page_size: int, pages: int, extra: int) -> None:
    """The last token is always computed, whatever its place in a page."""
    length = max(pages * page_size + extra, 1)
    cache = full_cache(16, page_size)
    hits: list[int | None] = []
    for turn in range(3):
        req = PlainRequest(str(turn), paged_tokens([7] * (pages + 1), page_size)[:length])
        hits.append(admit(cache, req))
        assert run_tokens(cache, req, length)
        cache.cache_finished_req(req)
        cache.check_invariants()
    again = (length - 1) // page_size * page_size
    assert hits == [0, again, again]


def test_after_unfinished_the_row_holds_the_trees_indices_and_the_new_lock_alone() -> None:
    cache = full_cache(16, 2)
    first, second = PlainRequest("a", [1, 2, 3, 4, 5]), PlainRequest("b", [1, 2, 3, 4, 9])
    for req in (first, second):
        assert admit(cache, req) == 0
        assert run_tokens(cache, req, 5)
    cache.cache_unfinished_req(first)
    own = cache.request_state("b").indices(0, 4).copy()
    cache.cache_unfinished_req(second)
    a, b = cache.request_state("a"), cache.request_state("b")
    assert a.indices(0, 4).tolist() == b.indices(0, 4).tolist() != own.tolist()
    assert a.protected_len == b.protected_len == 4
    assert a.lock.node is b.lock.node and a.lock.node.component_data[FULL].lock_ref == 2
    assert cache.num_receipts() == 2
    cache.check_invariants()


def test_only_computed_tokens_are_published() -> None:
    cache = full_cache(16)
    req = PlainRequest("a", [1, 2, 3, 4])
    admit(cache, req)
    assert cache.extend_req(req, 4) is not None
    cache.cache_unfinished_req(req)
    assert cache.peek_prefix_len(RadixKey([1, 2, 3, 4])) == 0
    cache.advance_req(req, 3)
    cache.cache_unfinished_req(req)
    assert cache.peek_prefix_len(RadixKey([1, 2, 3, 4])) == 3
    cache.abort_req(req)
    assert cache.peek_prefix_len(RadixKey([1, 2, 3, 4])) == 3
    cache.check_invariants()


def test_indices_continue_the_last_page_across_extends() -> None:
    cache = full_cache(8, 4)
    req = PlainRequest("a", list(range(9)))
    admit(cache, req)
    for upto in (3, 4, 9):
        assert run_tokens(cache, req, upto)
    assert np.concatenate(req.seen).tolist() == list(range(9))
    cache.check_invariants()


Leave = Callable[[UnifiedRadixCache, PlainRequest], None]
LEAVE: dict[str, Leave] = {
    "finish": lambda cache, req: cache.cache_finished_req(req),
    "drop": lambda cache, req: cache.cache_finished_req(req, is_insert=False),
    "abort": lambda cache, req: cache.abort_req(req),
    "retract": lambda cache, req: cache.retract_req(req),
}


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("how", LEAVE)
@pytest.mark.parametrize("step", range(7))
def test_leaving_at_every_step_frees_everything(page_size: int, how: str, step: int) -> None:
    cache = full_cache(16, page_size)
    insert(cache, paged_tokens([1, 2], page_size))
    req = PlainRequest("a", [*paged_tokens([1, 3, 4], page_size, page_size - 1), 5])
    half, whole = page_size + page_size // 2 + 1, len(req.token_ids)
    steps: list[Callable[[], object]] = [
        lambda: admit(cache, req),
        lambda: cache.extend_req(req, half - page_size),
        lambda: cache.advance_req(req, half - page_size),
        lambda: cache.cache_unfinished_req(req),
        lambda: run_tokens(cache, req, whole),
        lambda: cache.cache_unfinished_req(req),
        lambda: req.token_ids.append(6),
    ]
    for action in steps[: step + 1]:
        action()
        cache.check_invariants()
    LEAVE[how](cache, req)
    cache.check_invariants()
    assert cache.num_receipts() == 0 and cache.req_to_token.num_free == 4
    tree = cache.evictable_size(FULL)
    assert tree + cache.available_size(FULL) == 16 * page_size
    assert cache.evict(EvictParams(num_tokens=10**6)).num_tokens_evicted == tree


def test_a_retracted_request_resumes_from_what_it_computed() -> None:
    cache = full_cache(8, 2)
    req = PlainRequest("a", [1, 2, 3, 4, 5, 6])
    admit(cache, req)
    run_tokens(cache, req, 5)
    cache.retract_req(req)
    assert admit(cache, req) == 4


def test_admission_waits_when_free_and_evictable_do_not_cover_it() -> None:
    cache = full_cache(8)
    running = PlainRequest("a", [1, 2, 3, 4, 5])
    assert admit(cache, running) == 0
    assert run_tokens(cache, running, 5)
    late = PlainRequest("b", [6, 7, 8, 9])
    hit = cache.match_req(late)
    before = cache.digest()
    assert cache.admit_req(late, hit, num_tokens=4) is None
    assert cache.digest() == before
    cache.cache_finished_req(running)
    assert admit(cache, late) == 0


def test_the_matched_prefix_does_not_count_as_evictable_room() -> None:
    cache = full_cache(6)
    insert(cache, [1, 2, 3, 4])
    req = PlainRequest("a", [1, 2, 3, 4, 5, 6, 7])
    assert admit(cache, req) is None  # 2 free, 4 evictable, but those 4 are its own prefix
    shorter = PlainRequest("b", [1, 2, 3, 4, 5, 6])
    assert admit(cache, shorter) == 4


def test_admission_waits_for_a_row() -> None:
    cache = full_cache(16, max_requests=1)
    assert admit(cache, PlainRequest("a", [1, 2])) == 0
    assert admit(cache, PlainRequest("b", [3, 4])) is None
    cache.check_invariants()


def test_extend_evicts_what_is_short_and_nothing_when_it_cannot_help() -> None:
    cache = full_cache(8)
    insert(cache, [1, 2, 3, 4])
    req = PlainRequest("a", [9] * 8)
    admit(cache, req)
    assert cache.extend_req(req, 6) is not None
    assert cache.peek_prefix_len(RadixKey([1, 2, 3, 4])) == 2
    held = PlainRequest("b", [1])
    assert cache.extend_req(req, 2) is not None
    assert admit(cache, held) is None
    before = cache.digest()
    with pytest.raises(InvalidParamsError, match="max_context_len 8"):
        cache.extend_req(req, 1)
    assert cache.digest() == before


def test_a_request_that_can_never_fit_is_refused_with_the_sum() -> None:
    cache = full_cache(4, 16)
    with pytest.raises(RequestTooLargeError, match="65 tokens exceeds max_context_len 64"):
        cache.check_fits(65)
    cache.check_fits(64)
    wide = full_cache(4, 16)
    wide.req_to_token.max_context_len = 1000
    with pytest.raises(RequestTooLargeError, match=r"70 tokens needs 80 FULL units.* 64 per dp"):
        wide.check_fits(70)


def test_wrong_calls_name_the_request_and_change_nothing() -> None:
    cache = full_cache(8)
    req = PlainRequest("a", [1, 2, 3])
    for call in (
        lambda: cache.extend_req(req, 1),
        lambda: cache.advance_req(req, 1),
        lambda: cache.cache_unfinished_req(req),
        lambda: cache.cache_finished_req(req),
        lambda: cache.abort_req(req),
    ):
        with pytest.raises(RequestError, match="'a' is not live"):
            call()
    admit(cache, req)
    hit = match(cache, [])
    before = cache.digest()
    for call, names in (
        (lambda: cache.admit_req(req, hit, num_tokens=0), "live already"),
        (lambda: cache.advance_req(req, 1), "cannot advance by 1 from 0"),
        (lambda: cache.reset(), "1 request.* live"),
    ):
        with pytest.raises(RequestError, match=names):
            call()
    for number in (-1, 2.5, True, None, float("nan")):
        for method in (cache.extend_req, cache.advance_req):
            with pytest.raises(InvalidParamsError, match="num_tokens"):
                method(req, number)  # pyright: ignore[reportArgumentType]
    assert cache.digest() == before
    cache.abort_req(req)
    assert cache.available_size(FULL) == 8
    with pytest.raises(RequestError):
        cache.abort_req(req)


def test_a_request_with_a_field_that_is_none_leaves_no_lock_behind() -> None:
    cache = full_cache(8, dp_size=2)
    insert(cache, [1, 2, 3])
    before = cache.digest()
    for change in (
        {"extra_key": ["a"]},
        {"dp_rank": -1},
        {"dp_rank": 5},
        {"dp_rank": 0.0},
        {"priority": 1.5},
        {"token_ids": [1, 2, 3, -1]},
        {"token_ids": [1, 2, 4, 4]},
        {"token_ids": [1, 2]},
        {"extra_key": "other"},
        {"dp_rank": 1},
    ):
        req = PlainRequest("a", [1, 2, 3, 4])
        hit = match(cache, [1, 2, 3])
        before = cache.digest()
        for name, value in change.items():
            setattr(req, name, value)
        with pytest.raises((InvalidParamsError, InvalidKeyError)):
            cache.admit_req(req, hit, num_tokens=1)
        assert cache.digest() == before, change
    with pytest.raises(InvalidParamsError, match="num_tokens"):
        cache.admit_req(PlainRequest("a", [1, 2, 3, 4]), hit, num_tokens="3")  # pyright: ignore


def test_a_placeholder_token_is_refused_before_anything_is_evicted() -> None:
    cache = full_cache(8)
    req = PlainRequest("a", [1, 2, 3])
    admit(cache, req)
    run_tokens(cache, req, 3)
    req.token_ids[1:] = [2, 3, -1]
    assert cache.extend_req(req, 1) is not None
    cache.advance_req(req, 1)
    before = cache.digest()
    with pytest.raises(InvalidKeyError, match="-1"):
        cache.cache_finished_req(req)
    assert cache.digest() == before
    cache.abort_req(req)
    cache.check_invariants()


def test_a_live_requests_pages_cannot_be_inserted_or_freed_by_others() -> None:
    cache = full_cache(8)
    req = PlainRequest("a", [1, 2])
    admit(cache, req)
    run_tokens(cache, req, 2)
    theirs = np.array(cache.request_state("a").indices(0, 2))
    with pytest.raises(InvalidIndexError, match="a live request's"):
        cache.insert(InsertParams(key=RadixKey([5, 6]), value=theirs))
    with pytest.raises(InvalidIndexError, match="a live request's"):
        cache.token_allocator.free(theirs)
    cache.check_invariants()
    cache.cache_finished_req(req)
    cache.check_invariants()


def test_a_priority_may_be_any_integer() -> None:
    cache = full_cache(8)
    for priority in (-3, np.int64(2)):
        req = PlainRequest("a", [1, 2, 3], priority=int(priority))
        req.priority = priority  # pyright: ignore[reportAttributeAccessIssue]
        assert admit(cache, req) is not None
        assert run_tokens(cache, req, 3)
        cache.cache_finished_req(req)
        cache.check_invariants()


@pytest.mark.parametrize("last", [-1, 1.5])
def test_the_last_token_is_checked_although_it_cannot_match(last: int) -> None:
    with pytest.raises(InvalidKeyError):
        full_cache(8).match_req(PlainRequest("a", [1, 2, last]))


def test_a_match_evicted_before_admission_is_refused() -> None:
    cache = full_cache(8)
    insert(cache, [1, 2, 3])
    req = PlainRequest("a", [1, 2, 3, 4])
    hit = cache.match_req(req)
    cache.evict(EvictParams(num_tokens=8))
    with pytest.raises(StaleNodeError):
        cache.admit_req(req, hit, num_tokens=1)
    assert admit(cache, req) == 0
    cache.check_invariants()


@pytest.mark.parametrize("k", range(12))
def test_the_kth_allocation_failing_leaves_a_sound_cache(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every allocation in turn answers None; the request waits or is retracted, nothing leaks."""
    cache = full_cache(8, 2)
    pool, calls = cache.token_allocator, 0
    honest = pool.extend

    def extend(length: int, last: int, num: int, dp_rank: int = 0) -> IndexArray | None:
        nonlocal calls
        calls += 1
        return None if calls == k + 1 else honest(length, last, num, dp_rank)

    monkeypatch.setattr(pool, "extend", extend)
    done: list[str] = []
    for name in ("a", "b", "c"):
        req = PlainRequest(name, [1, 2, 3, 4, *name.encode()])
        assert admit(cache, req) is not None
        for upto in (2, 4, 5):
            while not run_tokens(cache, req, max(upto, cache.request_state(name).allocated_len)):
                cache.check_invariants()
            cache.cache_unfinished_req(req)
            cache.check_invariants()
        cache.cache_finished_req(req)
        done.append(name)
        cache.check_invariants()
    assert done == ["a", "b", "c"] and cache.evictable_size(FULL) + cache.available_size(FULL) == 16


def test_a_match_is_no_longer_the_requests_when_its_namespace_or_tokens_changed() -> None:
    cache = full_cache(32, dp_size=2)
    insert(cache, [0, 1, 2, 3], "a")
    for change in ({"extra_key": "b"}, {"dp_rank": 1}, {"token_ids": [0, 1, 2, 3]}):
        req = PlainRequest("r", [0, 1, 2, 3, 4], "a")
        found = cache.match_req(req)
        for name, value in change.items():
            setattr(req, name, value)
        with pytest.raises(InvalidParamsError, match="match"):
            cache.admit_req(req, found, 4)
    assert not cache.live_requests() and cache.num_receipts() == 0


def test_a_leaf_grows_with_its_request_and_an_old_match_ends_where_it_did() -> None:
    cache = full_cache(32)
    first, late = PlainRequest("a", list(range(9))), PlainRequest("b", [0, 1, 2, 7, 7])
    admit(cache, first)
    assert run_tokens(cache, first, 3)
    cache.cache_unfinished_req(first)
    found = cache.match_req(late)
    assert run_tokens(cache, first, 8)
    cache.cache_unfinished_req(first)
    assert [(node.start, node.end) for node in cache.nodes()[1:]] == [(0, 8)]
    state = cache.admit_req(late, found, 2)
    assert state is not None and state.cached_len == 3
    assert sorted((node.start, node.end) for node in cache.nodes()[1:]) == [(0, 3), (3, 8)]
    cache.check_invariants()


def test_a_match_made_by_hand_is_still_a_prefix_when_its_node_has_grown() -> None:
    cache = full_cache(32)
    first, late = PlainRequest("a", list(range(9))), PlainRequest("b", [0, 1, 2, 7, 7])
    admit(cache, first)
    assert run_tokens(cache, first, 3)
    cache.cache_unfinished_req(first)
    found = match(cache, [0, 1, 2, 7])
    assert run_tokens(cache, first, 8)
    cache.cache_unfinished_req(first)
    state = cache.admit_req(late, found, 2)
    assert state is not None and state.cached_len == 3
    with pytest.raises(InvalidParamsError, match="is not a prefix of request 'c'"):
        cache.admit_req(PlainRequest("c", [0, 1, 9, 9]), match(cache, [0, 1, 2]), 2)
    cache.check_invariants()


def test_a_leaf_that_another_holds_does_not_grow() -> None:
    cache = full_cache(32)
    req = PlainRequest("a", list(range(9)))
    admit(cache, req)
    assert run_tokens(cache, req, 3)
    cache.cache_unfinished_req(req)
    lock = cache.inc_lock_ref(match(cache, [0, 1, 2]).best_match_node)
    assert run_tokens(cache, req, 8)
    cache.cache_unfinished_req(req)
    assert lock.node.end == 3
    assert [(node.start, node.end) for node in cache.nodes()[1:]] == [(0, 3), (3, 8)]


def test_what_was_evicted_is_remembered_where_it_was_when_its_parent_has_grown() -> None:
    cache = full_cache(32)
    req = PlainRequest("a", list(range(8)))
    admit(cache, req)
    assert run_tokens(cache, req, 2)
    cache.cache_unfinished_req(req)
    insert(cache, [0, 1, 9])
    cache.evict(EvictParams(num_tokens=1))
    assert run_tokens(cache, req, 3)
    cache.cache_unfinished_req(req)
    assert match(cache, [0, 1, 9]).miss_reason is MissReason.FULL_EVICTED
    assert match(cache, [0, 1, 2, 9]).miss_reason is MissReason.NO_PREFIX


def test_page_tables_are_the_row_in_pages_and_read_only() -> None:
    cache = full_cache(8, 4)
    req = PlainRequest("a", list(range(20)))
    admit(cache, req)
    assert run_tokens(cache, req, 10)
    table = cache.page_tables(req, 10)[ComponentType.FULL]
    row = cache.token_indices(req, 10)[ComponentType.FULL]
    assert table.tolist() == [int(row[0]) // 4, int(row[4]) // 4, int(row[8]) // 4]
    assert row.tolist() == cache.request_state("a").indices(0, 10).tolist()
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 5
    assert cache.publishable_len(req, 10) == 8


class Breaks(FullHolding):
    """A holding that raises where it is told to."""

    def end(self) -> None:
        super().end()
        raise RuntimeError("broken")


@pytest.mark.parametrize("where", ["admit", "end"])
def test_what_a_component_raises_leaks_no_lock_and_no_row(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = full_cache(16)
    insert(cache, [1, 2, 3])
    component, req = cache.components[0], PlainRequest("r", [1, 2, 3, 4])

    def broken(state: RequestState, found: MatchResult) -> Breaks:
        if where == "admit":
            raise RuntimeError("broken")
        return Breaks(state, component.allocator, found.device_indices)

    monkeypatch.setattr(component, "admit", broken)
    with pytest.raises(RuntimeError, match="broken"):
        admit(cache, req)
        assert run_tokens(cache, req, 4)
        cache.abort_req(req)
    assert cache.num_receipts() == 0 and not cache.live_requests()
    assert cache.req_to_token.num_free == cache.req_to_token.max_requests
    cache.check_invariants()
    cache.reset()
