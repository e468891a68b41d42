"""Host tiers: what their hooks must do, as test classes to inherit; and a small tier that does it.

```python
class TestMyTier(HostTierConformance):
    def make_hooks(self, context):
        return MyTier(context, capacity_bytes=1 << 20)
```

`HiCacheConformance` is for hooks of any kind, `HostTierConformance` for a tier that brings data
back. Both run on pools on paper and on the installed components (``uhrc-full``, ``uhrc-swa``,
``uhrc-recurrent``); they need neither jax nor pytest: each ``test_*`` method raises AssertionError
and says which hook did what. A pool's ``read`` gives nested tuples of arrays, as real ones do.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from uhrc_core.cache.host_tier import (
    DeviceSpan,
    HiCacheContext,
    HiCacheEvent,
    HiCacheHooks,
    HostQuery,
    PrefetchEvent,
    WriteBackEvent,
    WriteThroughEvent,
)
from uhrc_core.cache.key import ExtraKey, RadixKey
from uhrc_core.kinds import ComponentType
from uhrc_core.testing.actions import RandomProgram, page_tokens
from uhrc_core.testing.hicache_bench import HostBench, units_of
from uhrc_core.testing.paper import PlainRequest

_FULL = {"full": {"num_tokens": 72}}


def _tables(page_size: int, **components: Mapping[str, object]) -> dict[str, Any]:
    cache = {
        "enable_unified_radix_tree": True,
        "page_size": page_size,
        "dp_size": 2,
        "max_requests": 3,
        "max_context_len": 72,
    }
    return {"cache": cache, "components": {**_FULL, **components}}


#: The caches that a tier is run on, as config tables.
CACHES: Mapping[str, Mapping[str, Any]] = {
    "FULL": _tables(1),
    "FULL, pages of 4": _tables(4),
    "FULL and SWA": _tables(4, swa={"window_tokens": 6, "extend_tokens": 12, "num_tokens": 64}),
    "FULL and RECURRENT": _tables(1, recurrent={"backend": "kda", "num_slots": 8}),
    "FULL and RECURRENT, pages of 4": _tables(
        4,
        recurrent={
            "backend": "kda",
            "num_slots": 12,
            "enable_extra_buffer": True,
            "track_interval": 4,
        },
    ),
}


class HiCacheConformance(ABC):
    """Inherit, say how the hooks are made, and pytest runs every check.

    Attributes:
        caches: config tables of the caches to run on, by a name for messages; sized as `CACHES`.
        seeds: of the random runs, ``steps`` whole requests and as many steps of a
            `RandomProgram` each, on two dp ranks.
    """

    caches: Mapping[str, Mapping[str, Any]] = CACHES
    seeds: Sequence[int] = (0, 1)
    steps: int = 40

    @abstractmethod
    def make_hooks(self, context: HiCacheContext) -> HiCacheHooks:
        """Fresh hooks for one cache; its pools are in the context."""

    def test_random_lives_of_requests(self) -> None:
        """Every hook is called, in every order; the tree stays sound and holds the right data."""
        for bench in self._benches():
            for seed in self.seeds:
                self._run(bench, seed)
                bench.cache.reset()

    def test_the_same_calls_get_the_same_answers(self) -> None:
        """Hosts in lockstep stay in lockstep."""
        for name in self.caches:
            one, other = self._bench(name), self._bench(name)
            digests: list[str] = []
            for bench in (one, other):
                digests.append(self._run(bench, self.seeds[0]))
            assert one.watch and other.watch
            assert one.watch.answers == other.watch.answers and len({*digests}) == 1, (
                f"{name}: equal calls got the answers {one.watch.answers} and then "
                f"{other.watch.answers}; hosts in lockstep would part ways"
            )

    def test_namespaces_and_ranks_are_apart(self) -> None:
        """What was given for one (extra_key, dp_rank) is not claimed for another."""
        for bench in self._benches():
            for extra_key, dp_rank in _NAMESPACES:
                request = self._request(bench, 5, 1, extra_key=extra_key, dp_rank=dp_rank)
                bench.cached_len(request)
                bench.evict()

    def test_a_reset_forgets_everything(self) -> None:
        for bench in self._benches():
            bench.cached_len(self._request(bench, 5))
            bench.evict()
            bench.cache.reset()
            bench.cached_len(self._request(bench, 5, 1))

    def test_what_making_room_drops_is_not_brought_back(self) -> None:
        """The device is full of another prompt, so a prefetch is preceded by `write_back`.

        Prefixes of many lengths: which of them fill a tier depends on how much it holds.
        """
        for bench in self._benches():
            capacity, page_size = bench.cache.token_allocator.capacity, bench.cache.page_size
            other = page_tokens(list(range(200, 200 + capacity // page_size)), page_size)
            # Of an aborted request a tier is told when it is evicted, and not before; but page by
            # page of a recurrent cache only a finished one leaves anything.
            for leave in (bench.cache.abort_req, bench.cache.cache_finished_req):
                for num_pages in range(1, capacity // page_size - 2, 3):
                    bench.cached_len(self._request(bench, num_pages))
                    bench.evict()
                    req = PlainRequest("other", other)
                    bench.compute(req)
                    leave(req)
                    bench.cached_len(self._request(bench, num_pages, 1))
                    bench.cache.reset()

    def _run(self, bench: HostBench, seed: int) -> str:
        """Whole requests with evictions between, then requests at all stages; the digest."""
        rng = random.Random(seed)
        for _ in range(self.steps):
            turns = [rng.choice((1, 2, 2, 4)) for _ in range(rng.randint(1, 3))]
            extra_key, dp_rank = rng.choice(_NAMESPACES)
            bench.cached_len(self._request(bench, *turns, extra_key=extra_key, dp_rank=dp_rank))
            kind = rng.choice(bench.cache.components).kind
            bench.evict(kind, num_units=rng.choice((1, 4, 16)))
        program = RandomProgram(bench.cache, seed)
        program.device = bench
        program.run(self.steps)
        program.end()
        return bench.cache.digest()

    def _benches(self) -> Iterator[HostBench]:
        for name in self.caches:
            try:
                yield self._bench(name)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    def _bench(self, name: str) -> HostBench:
        return HostBench(self.make_hooks, self.caches[name])

    def _request(
        self,
        bench: HostBench,
        *turns: int,
        extra_key: ExtraKey = None,
        dp_rank: int = 0,
    ) -> PlainRequest:
        """A prompt that goes on from the one of ``turns[:-1]``: so many pages, and a token more."""
        tokens: list[int] = []
        for number, num_pages in enumerate(turns):
            first = 10 * number
            pages = list(range(first, first + num_pages))
            # The last page says how long the turn is, so that turns of two lengths part before.
            pages[-1] = 100 + num_pages
            tokens += [*page_tokens(pages, bench.cache.page_size), num_pages]
        return PlainRequest(f"r{bench.cache.stats().match_count}", tokens, extra_key, dp_rank)


_NAMESPACES: tuple[tuple[ExtraKey, int], ...] = ((None, 0), ("lora", 0), ("", 0), (None, 1))


class HostTierConformance(HiCacheConformance):
    """For a tier that holds all that it was given, at least in these short checks."""

    def test_what_was_evicted_is_hit_as_if_it_had_stayed(self) -> None:
        """A conversation of three turns; all that was cached is evicted before each."""
        for name in self.caches:
            kept, evicted = HostBench(None, self.caches[name]), self._bench(name)
            for turns in ((4,), (4, 3), (4, 2), (4, 3, 3)):
                hit = kept.cached_len(self._request(kept, *turns))
                brought = evicted.cached_len(self._request(evicted, *turns))
                assert brought == hit, (
                    f"{name}: turns of {turns} pages hit {hit} tokens while their prefix was on "
                    f"the device, but {brought} after it had been evicted"
                )
                evicted.evict()
            assert evicted.watch and evicted.watch.prefetched, f"{name}: nothing was prefetched"

    def test_what_is_left_on_the_device_is_not_brought_again(self) -> None:
        """The end of a prefix was evicted; only that comes from the host."""
        for bench in self._benches():
            bench.cached_len(self._request(bench, 4))
            bench.cached_len(self._request(bench, 4, 4))
            page_size = bench.cache.page_size
            bench.evict(ComponentType.FULL, num_units=page_size)
            left = bench.cache.match_req(self._request(bench, 4, 4, 1)).full_hit_length
            bench.cached_len(self._request(bench, 4, 4, 1))
            assert bench.watch
            for event in bench.watch.prefetched:
                assert event.start >= left, f"{left} tokens were there, {event} brings more"

    def test_a_snapshot_comes_back_alone(self) -> None:
        """An inner node lost its recurrent state and kept its KV."""
        for name in self.caches:
            if "recurrent" not in self.caches[name]["components"]:
                continue
            bench = self._bench(name)
            bench.cached_len(self._request(bench, 4))
            bench.cached_len(self._request(bench, 4, 4))
            again = self._request(bench, 4, 1)
            key = again.key(len(again.token_ids))
            hit = bench.cache.peek_prefix_len(key)
            assert hit, f"{name}: the inner node gave no hit while it was whole"
            while bench.cache.peek_prefix_len(key) == hit:
                bench.evict(ComponentType.RECURRENT, num_units=1)
            assert bench.watch is not None
            before = len(bench.watch.answers)
            bench.cached_len(again)
            kinds = [event.kinds for event in bench.watch.prefetched]
            where = f"{name}: the RECURRENT state after {hit} tokens"
            found, *refused = bench.watch.answers[before:]
            answer = "prefetch answered False" if refused else f"lookup answered {found}"
            assert kinds, f"{where} was not brought back: {answer}"
            assert kinds == [(ComponentType.RECURRENT,)], (
                f"{where}, alone, was evicted, but a prefetch brought "
                f"{[kind.name for each in kinds for kind in each]}"
            )


class CopyingTier(HiCacheHooks):
    """The smallest tier that works: it copies all it is told of, and forgets nothing.

    What a page of tokens (FULL, SWA) or a state (RECURRENT) is called is a hash over the namespace
    and all tokens up to its end, page by page, so names are found in one pass over a key.
    """

    def __init__(self, context: HiCacheContext) -> None:
        self._page_size = context.page_size
        self._components = context.components
        self._pools = context.device_pools
        self._data: dict[tuple[ComponentType, bytes], Any] = {}

    def lookup(self, query: HostQuery) -> int:
        names = self._names(query.key)
        for stop in range(len(query.key), query.hit_len, -self._page_size):
            needs = query.needs(stop)
            # What is held of a prefix is mostly its beginning, so one look at the end is enough.
            if needs and all(
                (need.kind, names[end]) in self._data
                for need in needs
                for end in reversed(self._ends(need.kind, need.start, need.stop))
            ):
                return stop
        return 0

    def prefetch(self, event: PrefetchEvent) -> bool:
        pieces = list(self._pieces(event))
        if any(name not in self._data for name, _ in pieces):
            return False
        for name, units in pieces:
            self._pools[name[0]].write(units, self._data[name])
        return True

    def write_through(self, event: WriteThroughEvent) -> None:
        self._store(event)

    def write_back(self, event: WriteBackEvent) -> None:
        self._store(event)

    def reset(self) -> None:
        self._data.clear()

    def _store(self, event: HiCacheEvent) -> None:
        for name, units in self._pieces(event):
            if name not in self._data:
                self._data[name] = self._pools[name[0]].read(units)

    def _pieces(self, event: HiCacheEvent) -> Iterator[tuple[tuple[ComponentType, bytes], Any]]:
        """Name and pool units of each page or state of an event."""
        names = self._names(event.key)
        for span in event.spans:
            units = units_of(span, event.dp_rank, self._components[span.kind].num_units)
            ends = self._ends(span.kind, span.start, span.stop)
            size = self._size(span)
            for number, end in enumerate(ends):
                yield (span.kind, names[end]), units[number * size : (number + 1) * size]

    def _size(self, span: DeviceSpan) -> int:
        return 1 if span.kind is ComponentType.RECURRENT else self._page_size

    def _ends(self, kind: ComponentType, start: int, stop: int) -> Sequence[int]:
        """The depths at which the pages of a span, or its state, end."""
        if kind is ComponentType.RECURRENT:
            return (stop,)
        return range(start + self._page_size, stop + 1, self._page_size)

    def _names(self, key: RadixKey) -> dict[int, bytes]:
        """The name of what ends at each whole page of a key."""
        chain = hashlib.blake2b(repr(key.namespace).encode(), digest_size=16)
        names: dict[int, bytes] = {}
        for start in range(0, key.page_floor(self._page_size), self._page_size):
            chain.update(key.page(start, self._page_size))
            names[start + self._page_size] = chain.digest()
        return names
