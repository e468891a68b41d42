"""ComponentConformance: what a tree with your component in it must do, as a test class to inherit.

```python
class TestMyFull(ComponentConformance):
    def make_cache(self, page_size, num_pages, dp_size):
        pool = PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, dp_size)
        return UnifiedRadixCache(
            [MyFullComponent(pool, LRU(), eviction_priority=2)],
            page_size=page_size,
            dp_size=dp_size,
            max_requests=3,
            max_context_len=num_pages * page_size,
        )
```

Needs neither jax nor pytest: each ``test_*`` method raises AssertionError. Random programs print
their seed in it; ``RandomProgram(cache, seed)`` makes the same calls again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import numpy as np

from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import EvictParams, IncLockRefResult, MatchPrefixParams, MatchResult
from uhrc_core.errors import StaleNodeError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.testing.actions import (
    RandomProgram,
    check_locked,
    check_nothing_is_held,
    check_peek,
    locked_indices,
    page_tokens,
)
from uhrc_core.testing.faults import failing_allocation
from uhrc_core.testing.paper import PaperDevice, PlainRequest, positions

#: FULL pages per rank: few enough to run full, and enough for every request of a short check.
FEW_PAGES, MANY_PAGES = 18, 64

#: Component and position of every value on a path → its index.
_Places = dict[tuple[ComponentType, int], int]
#: A step in the life of a request, by name.
_LifeStep = tuple[str, Callable[[], object]]


class ComponentConformance(ABC):
    """Inherit, say how a cache with the component is made, and pytest runs every check.

    Attributes:
        page_sizes: to run everything with.
        seeds: of the random programs, `steps` steps each, on two dp ranks.
    """

    page_sizes: Sequence[int] = (1, 4)
    seeds: Sequence[int] = range(12)
    steps: int = 80

    @abstractmethod
    def make_cache(self, page_size: int, num_pages: int, dp_size: int) -> BasePrefixCache:
        """A fresh cache with the component, on ``dp_size`` ranks.

        Its FULL pool has ``num_pages`` pages per rank, any other pool enough for three requests and
        as much for the tree; ``max_requests`` is 3 and ``max_context_len`` no more than the FULL
        pool. A forward adds at most `FORWARD_PAGES` pages to a request.
        """

    def window_tokens(self, page_size: int) -> int | None:
        """How many tokens a token attends to, itself included, where the cache has windows."""
        return None

    # -- random programs -----------------------------------------------------------------------

    def test_random_programs_keep_every_rule(self) -> None:
        """After each step: all invariants, locked data where it was, every place of a pool holds
        what the tree says. At the end everything comes back."""
        for page_size in self.page_sizes:
            hits = evicted = 0
            for seed in self.seeds:
                program = self._program(page_size, seed)
                program.run(self.steps)
                program.end()
                stats = program.cache.stats()
                hits += stats.hit_num_tokens
                evicted += stats.evicted.num_tokens_evicted
            assert hits, (
                f"page_size {page_size}: no program ever hit a prefix; are pools too small?"
            )
            assert evicted, f"page_size {page_size}: no program ever evicted; are pools too large?"

    def test_equal_programs_give_equal_digests(self) -> None:
        """Every host of a multi-host engine takes the same decisions."""
        for page_size in self.page_sizes:
            for seed in self.seeds[:3]:
                first, second = (self._program(page_size, seed).run(self.steps) for _ in range(2))
                differ = [step for step in range(self.steps) if first[step] != second[step]]
                assert not differ, (
                    f"seed {seed}, step {differ[0]}: two caches with the same calls differ; look "
                    "for id(), hash order or a clock"
                )

    def test_the_kth_allocation_fails(self) -> None:
        """For every k and every component: no exception, no leak, and the program goes on."""
        for page_size in self.page_sizes:
            kinds = [c.kind for c in self.make_cache(page_size, FEW_PAGES, 1).components]
            for kind in kinds:
                k, failed = 0, True
                while failed:
                    k += 1
                    failed = self._run_with_failure(page_size, kind, k)
                assert k > 1, f"{kind.name}: the program allocates nothing"

    def _run_with_failure(self, page_size: int, kind: ComponentType, k: int) -> bool:
        program = self._program(page_size, self.seeds[0])
        pool = next(c.allocator for c in program.cache.components if c.kind is kind)
        with _named(f"allocation {k} of {kind.name} fails"):
            with failing_allocation(pool, k) as count:
                program.run(self.steps // 2)
            program.end()
        return count.failed

    def test_peek_says_what_match_finds(self) -> None:
        """And changes nothing: the digest before and after is the same."""
        for page_size in self.page_sizes:
            program = self._program(page_size, self.seeds[0])
            program.run(self.steps)
            for _ in range(20):
                check_peek(program.cache, program.key())

    def _program(self, page_size: int, seed: int) -> RandomProgram:
        cache = self.make_cache(page_size, FEW_PAGES, 2)
        window_tokens = self.window_tokens(page_size)
        has_windows = any(component.kind is ComponentType.SWA for component in cache.components)
        assert has_windows == (window_tokens is not None), (
            "the cache has windows: let the suite's window_tokens say how long they are"
            if has_windows
            else "window_tokens of a cache that has no windows"
        )
        return RandomProgram(cache, seed, window_tokens)

    # -- life of a request ---------------------------------------------------------------------

    def test_an_abort_at_any_step_of_a_life_returns_everything(self) -> None:
        """Of a request that hits a prefix."""
        for page_size in self.page_sizes:
            steps = len(self._life(*self._warm_cache(page_size)))
            for count in range(1, steps + 1):
                cache, device = self._warm_cache(page_size)
                life = self._life(cache, device)
                for _, step in life[:count]:
                    step()
                cache.abort_req(cache.live_requests()[0].request)
                where = f"page_size {page_size}, abort after {life[count - 1][0]}"
                check_nothing_is_held(cache, where)
                with _named(where):
                    cache.check_invariants()

    def _life(self, cache: BasePrefixCache, device: PaperDevice) -> list[_LifeStep]:
        """The steps of a request that hits what `_warm_cache` left, and what each is called."""
        page = cache.page_size
        req = PlainRequest("r", page_tokens([0, 1, 2, 3, 4, 5], page, 1))
        again: list[_LifeStep] = [
            ("extend_req", lambda: device.extend(req, len(req.token_ids))),
            (
                "advance_req",
                lambda: device.forward(req, cache.request_state("r").allocated_len),
            ),
            ("cache_unfinished_req", lambda: cache.cache_unfinished_req(req)),
        ]
        start: list[_LifeStep] = [
            ("admit_req", lambda: device.admit(req)),
            ("started_req", lambda: device.start(req)),
        ]
        return [*start, *again, *again]

    def test_a_full_pool_is_answered_and_not_raised(self) -> None:
        """Requests are extended page by page until nothing is left for any of them."""
        for page_size in self.page_sizes:
            cache = self.make_cache(page_size, FEW_PAGES, 1)
            device = PaperDevice(cache, self.window_tokens(page_size))
            live: list[PlainRequest] = []
            where = f"page_size {page_size}: a pool runs full"
            with _named(where):
                for number in range(FEW_PAGES):
                    req = PlainRequest(f"r{number}", page_tokens([number + 1], page_size))
                    if device.admit(req):
                        device.start(req)
                        live.append(req)
                refused = self._grow_until_refused(cache, device, live)
                cache.check_invariants()
            assert refused, f"{where}: no request was ever refused; max_context_len is too small"
            for req in live:
                cache.abort_req(req)
            check_nothing_is_held(cache, where)

    def _grow_until_refused(
        self, cache: BasePrefixCache, device: PaperDevice, live: list[PlainRequest]
    ) -> int:
        """One page more for each in turn, as far as their contexts go; how many were refused."""
        refused = 0
        for _ in range(FEW_PAGES):
            for req in live:
                seqlen = cache.request_state(req.rid).computed_len
                stop = min(seqlen + cache.page_size, cache.req_to_token.max_context_len)
                missing = stop - len(req.token_ids)
                req.token_ids += page_tokens([77], cache.page_size)[: max(missing, 0)]
                end = device.extend(req, stop)
                refused += end is None
                if end is not None:
                    device.forward(req, end)
        return refused

    def test_a_match_that_was_evicted_is_refused_or_still_right(self) -> None:
        """The hit's node stays, since something below it is locked, and loses one component's
        data before the request is admitted."""
        for page_size in self.page_sizes:
            kinds = [c.kind for c in self.make_cache(page_size, FEW_PAGES, 1).components]
            for kind in kinds:
                cache, device = self._warm_cache(page_size)
                below = PlainRequest("below", page_tokens([0, 1, 2, 3, 4, 5, 6], page_size))
                device.serve(below)
                key = below.key(len(below.token_ids))
                cache.inc_lock_ref(cache.match_prefix(MatchPrefixParams(key=key)).best_match_node)
                req = PlainRequest("late", page_tokens([0, 1, 2, 3], page_size, 1))
                match = cache.match_req(req)
                amount = {kind.evict_field: cache.token_allocator.capacity}
                cache.evict(EvictParams(shortfall=False, **amount))
                with _named(
                    f"page_size {page_size}: {kind.name} evicted between match and admission"
                ):
                    self._admit_late(device, req, match)
                    cache.check_invariants()

    def _admit_late(self, device: PaperDevice, req: PlainRequest, match: MatchResult) -> None:
        try:
            admitted = device.cache.admit_req(req, match, len(req.token_ids) - match.hit_len)
        except StaleNodeError:
            return
        assert admitted is not None, "not admitted; the pools are too small for this check"
        device.start(req)
        stop = device.extend(req, len(req.token_ids))
        assert stop is not None, "not extended; the pools are too small for this check"
        device.forward(req, stop)

    # -- locks and eviction --------------------------------------------------------------------

    def test_locked_data_is_never_evicted_and_all_else_is(self) -> None:
        for page_size in self.page_sizes:
            cache, _ = self._warm_cache(page_size)
            lock = self._lock(cache)
            before = locked_indices(cache)
            with _named(f"page_size {page_size}: evicting while a prefix is locked"):
                _evict_all(cache)
                cache.check_invariants()
            with _named(f"page_size {page_size}: locked data was evicted"):
                check_locked(before, locked_indices(cache))
                assert cache.peek_prefix_len(_warm_key(page_size)) == lock.node.end
            cache.dec_lock_ref(lock.node, lock.to_dec_params())
            _evict_all(cache)
            for component in cache.components:
                left = component.allocator.capacity - component.allocator.available_size(0)
                assert not left, f"{component.kind.name}: {left} unlocked units cannot be evicted"

    def test_two_holders_of_a_node_do_not_release_each_other(self) -> None:
        for page_size in self.page_sizes:
            for released in (0, 1):
                cache, _ = self._warm_cache(page_size)
                locks = [self._lock(cache), self._lock(cache)]
                other = locks[1 - released]
                before = locked_indices(cache)
                mine = locks[released]
                cache.dec_lock_ref(mine.node, mine.to_dec_params())
                with _named(f"page_size {page_size}: one holder's release took another's lock"):
                    _evict_all(cache)
                    check_locked(before, locked_indices(cache))
                    assert cache.peek_prefix_len(_warm_key(page_size)) == other.node.end
                    cache.check_invariants()
                cache.dec_lock_ref(other.node, other.to_dec_params())
                check_nothing_is_held(cache, "after both releases")

    def test_a_hit_counts_as_a_use(self) -> None:
        """Of the data it ends with, in every component that has some there; else what is in use
        is evicted first."""
        for page_size in self.page_sizes:
            cache, _ = self._warm_cache(page_size)
            node = self._lock(cache).node
            before = [
                (c.data(node).last_access_time, c.data(node).hit_count) for c in cache.components
            ]
            self._lock(cache)
            for component, old in zip(cache.components, before, strict=True):
                data = component.data(node)
                assert data.value is None or old != (data.last_access_time, data.hit_count), (
                    f"page_size {page_size}: {component.kind.name}: a hit left no trace at {node}; "
                    "refresh must touch what it consumed"
                )

    # -- split ---------------------------------------------------------------------------------

    def test_a_split_divides_values_and_keeps_locks(self) -> None:
        """A prompt that forks inside an edge moves no data, and shares no array between nodes."""
        for page_size in self.page_sizes:
            cache, device = self._warm_cache(page_size)
            lock = self._lock(cache)
            before = _places(cache, lock)
            where = f"page_size {page_size}: split of a locked edge"
            with _named(where):
                device.serve(PlainRequest("fork", page_tokens([0, 1, 7, 8], page_size, 1)))
            ends = [node.end for node in lock.node.path_to_root()]
            assert 2 * page_size in ends, f"{where}: no node ends at the fork, but at {ends}"
            with _named(where):
                after = _places(cache, lock)
                moved = {at: index for at, index in before.items() if after.get(at) != index}
                assert not moved, f"the split moved or lost {moved}"
                _check_values_are_own(cache)
                cache.check_invariants()
                device.check_tree()
                cache.dec_lock_ref(lock.node, lock.to_dec_params())
                check_nothing_is_held(cache, "a lock taken before the split was released after it")
                cache.check_invariants()

    # -- building ------------------------------------------------------------------------------

    def _warm_cache(self, page_size: int) -> tuple[BasePrefixCache, PaperDevice]:
        """A roomy cache of one rank that has served one request of `_warm_key`."""
        cache = self.make_cache(page_size, MANY_PAGES, 1)
        device = PaperDevice(cache, self.window_tokens(page_size))
        with _named(f"page_size {page_size}: serving one request"):
            device.serve(PlainRequest("warm", page_tokens([0, 1, 2, 3], page_size)))
        return cache, device

    def _lock(self, cache: BasePrefixCache) -> IncLockRefResult:
        match = cache.match_prefix(MatchPrefixParams(key=_warm_key(cache.page_size)))
        assert match.hit_len, (
            "a prompt of 4 pages that was served gives no hit; let make_cache give it room, and "
            "let components publish at every page"
        )
        return cache.inc_lock_ref(match.best_match_node)


@contextmanager
def _named(what: str) -> Generator[None, None, None]:
    """Whatever is raised inside becomes an AssertionError that begins with ``what``."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def _warm_key(page_size: int) -> RadixKey:
    tokens = page_tokens([0, 1, 2, 3], page_size)
    return PlainRequest("warm", tokens).key(len(tokens))


def _evict_all(cache: BasePrefixCache) -> None:
    amounts = {c.kind.evict_field: c.allocator.capacity for c in cache.components}
    cache.evict(EvictParams(shortfall=False, **amounts))


def _places(cache: BasePrefixCache, lock: IncLockRefResult) -> _Places:
    return {
        (component.kind, position): index
        for node in lock.node.path_to_root()
        for component in cache.components
        for position, index in positions(node, component.data(node).value)
    }


def _check_values_are_own(cache: BasePrefixCache) -> None:
    """No two values share memory, and none keeps a larger array alive."""
    seen: list[tuple[str, IndexArray]] = []
    for node in cache.nodes()[1:]:
        for component in cache.components:
            value = component.data(node).value
            if value is None:
                continue
            name = f"{component.kind.name} value of {node}"
            assert value.base is None, f"{name} is a view of another array; copy it"
            for other, array in seen:
                assert not np.shares_memory(value, array), f"{name} shares its array with {other}"
            seen.append((name, value))
