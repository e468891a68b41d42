"""What the host-tier kit runs on: a cache, its pools on paper, and a watch on every hook.

A unit of a `PaperPool` holds a number that stands for what a model would have there: the data of
one component, after these tokens, in this namespace. So wherever a tier takes data from or puts it,
the watch can say what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from uhrc_core.assemble import build_kv_cache
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
from uhrc_core.cache.key import TOKEN_BYTES, RadixKey
from uhrc_core.cache.params import EvictParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.config.loading import parse_config
from uhrc_core.config.resolve import resolve
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.specs import HiCacheParams, HiCacheSpec
from uhrc_core.testing.paper import PaperDevice, Place, PlainRequest, Prefix

Units = npt.NDArray[np.int64]
#: What `PaperPool.read` gives: nested like a device pool's, one layer of one array.
PoolData = tuple[tuple[Units]]

#: What a unit holds that nobody wrote to; that is free; that a prefetch is to fill.
_UNWRITTEN, _FREED, _AWAITED = -1, -2, -3
_MARKS = {
    _UNWRITTEN: "what nobody ever wrote",
    _FREED: "what was there after it had been freed: take a copy before write_back returns",
    _AWAITED: "nothing: prefetch answered True and did not write there",
}
_MEANWHILE = (
    "; since the lookup, room was made by a write_back: if that dropped what lookup saw, prefetch "
    "must answer False"
)


class PaperPool:
    """A device pool of ``num_units`` numbers with the `read` and `write` of a real one."""

    def __init__(self, num_units: int) -> None:
        self.units: Units = np.full(num_units, _UNWRITTEN, np.int64)

    def read(self, units: npt.ArrayLike) -> PoolData:
        """Copies of int64[n], one layer of one array."""
        return ((self.units[np.asarray(units, np.int64)],),)

    def write(self, units: npt.ArrayLike, data: PoolData) -> None:
        """Stores what `read` gave, or equal shapes."""
        self.units[np.asarray(units, np.int64)] = data[0][0]


@dataclass(frozen=True, slots=True)
class _Data:
    """What a number in a pool stands for."""

    kind: ComponentType
    prefix: Prefix

    def __str__(self) -> str:
        (extra_key, dp_rank), tokens = self.prefix
        length = len(tokens) // TOKEN_BYTES
        return f"{self.kind.name} after {length} tokens of ({extra_key!r}, rank {dp_rank})"


class _Numbers:
    """A number for each datum, and back."""

    def __init__(self) -> None:
        self._of: dict[_Data, int] = {}
        self._data: list[_Data] = []

    def number(self, data: _Data) -> int:
        if data not in self._of:
            self._of[data] = len(self._data)
            self._data.append(data)
        return self._of[data]

    def data(self, number: int) -> _Data | None:
        return self._data[number] if 0 <= number < len(self._data) else None


class HostBench(PaperDevice):
    """A cache with a host tier, on paper pools; raises AssertionError at a tier's first fault.

    Args:
        make_hooks: of the tier under test; ``None``: no tier.
        tables: of the config, without ``[hicache]``; every pool with its size.
    """

    def __init__(
        self,
        make_hooks: Callable[[HiCacheContext], HiCacheHooks] | None,
        tables: Mapping[str, Any],
    ) -> None:
        resolved = resolve(parse_config(tables, environ={}), environ={})
        self.numbers = _Numbers()
        self.pools = {
            part.spec.kind: PaperPool((part.params.num_units or 0) * part.context.dp_size)
            for part in resolved.components
        }
        self.watch: HookWatch | None = None

        def watched(_: object, context: HiCacheContext) -> HiCacheHooks:
            assert make_hooks is not None
            self.watch = HookWatch(make_hooks(context), context, self)
            return self.watch

        spec = HiCacheSpec("under test", HiCacheParams, watched)
        resolved = replace(resolved, host_tier=spec if make_hooks else None)
        cache = build_kv_cache(resolved, self.pools)
        assert isinstance(cache, UnifiedRadixCache), cache
        super().__init__(cache, tables["components"].get("swa", {}).get("window_tokens"))

    # -- pools ---------------------------------------------------------------------------------

    def unit(self, place: Place) -> tuple[Units, int]:
        kind, dp_rank, index = place
        units = self.pools[kind].units
        return units, dp_rank * (len(units) // self.cache.dp_size) + index

    def read(self, place: Place) -> Prefix | None:
        units, at = self.unit(place)
        data = self.numbers.data(int(units[at]))
        return data.prefix if data is not None and data.kind is place[0] else None

    def write(self, place: Place, prefix: Prefix) -> None:
        units, at = self.unit(place)
        units[at] = self.numbers.number(_Data(place[0], prefix))

    def spoil_free_units(self) -> None:
        """Overwrite all that nobody owns, as other requests would."""
        for component in self.cache.components:
            pool = component.allocator
            for dp_rank in range(self.cache.dp_size):
                pages = pool.free_pages(dp_rank)
                for page in pages.tolist():
                    units, at = self.unit((component.kind, dp_rank, page * pool.page_size))
                    units[at : at + pool.page_size] = _FREED

    # -- requests ------------------------------------------------------------------------------

    def admit(self, req: PlainRequest) -> bool:
        match = self.cache.match_req(req)
        match = self.cache.prefetch_req(req, match)
        self._check_hooks()
        self.check_hit(req.key(len(req.token_ids)), match)
        num_tokens = len(req.token_ids) - match.hit_len
        return self.cache.admit_req(req, match, num_tokens) is not None

    def cached_len(self, req: PlainRequest) -> int:
        """Run a whole request; the tokens it did not have to compute."""
        before = self.cache.stats()
        self.serve(req)
        self.check_tree()
        after = self.cache.stats()
        hits = after.hit_num_tokens - before.hit_num_tokens
        return hits + after.prefetched_num_tokens - before.prefetched_num_tokens

    def evict(self, *kinds: ComponentType, num_units: int | None = None) -> None:
        """Evict so much of these components (all, of all), and let others write there."""
        wanted = kinds or tuple(component.kind for component in self.cache.components)
        for dp_rank in range(self.cache.dp_size):
            amounts: dict[str, Any] = {
                kind.evict_field: num_units or self.cache.evictable_size(kind, dp_rank)
                for kind in wanted
            }
            self.cache.evict(EvictParams(dp_rank=dp_rank, **amounts))
        self.spoil_free_units()
        self.check_tree()

    def check_tree(self) -> None:
        self._check_hooks()
        self.cache.check_invariants()
        super().check_tree()

    def _check_hooks(self) -> None:
        if self.watch is not None:
            assert not self.watch.problems, "\n".join(self.watch.problems)
        assert self.cache.hicache.fault is None, self.cache.hicache.fault


class HookWatch(HiCacheHooks):
    """Passes every call on to the tier under test and notes what is wrong with what it does.

    Attributes:
        problems: a line each.
        answers: of `lookup` and `prefetch`, in order.
        prefetched: the events that were answered with ``True``.
    """

    def __init__(self, hooks: HiCacheHooks, context: HiCacheContext, bench: HostBench) -> None:
        self._hooks = hooks
        self._page_size = context.page_size
        self._bench = bench
        self._given: set[int] = set()
        self._meanwhile = ""
        self.problems: list[str] = []
        self.answers: list[int] = []
        self.prefetched: list[PrefetchEvent] = []

    def lookup(self, query: HostQuery) -> int:
        self._meanwhile = ""
        before = self._pools()
        stop = self._hooks.lookup(query)
        self._check_untouched("lookup", before)
        for need in (stop and query.needs(stop)) or ():
            missing = [
                data
                for data in _wanted(query.key, need.kind, need.start, need.stop)
                if self._bench.numbers.number(data) not in self._given
            ]
            if missing:
                self.problems.append(
                    f"lookup claims depth {stop}, but the tier was never given {missing[0]}"
                    + self._elsewhere(missing[0])
                )
        self.answers.append(stop)
        return stop

    def prefetch(self, event: PrefetchEvent) -> bool:
        for units, at, _ in self._units(event):
            units[at] = _AWAITED
        before = self._pools()
        try:
            done = self._hooks.prefetch(event)
        except Exception as error:
            self.problems.append(f"prefetch raised {error!r}{self._meanwhile}")
            raise
        expected = list(self._units(event))
        if done:
            for units, at, data in expected:
                self._check_loaded(int(units[at]), data)
        own = {(id(units), at) for units, at, _ in expected}
        for kind, units in before.items():
            now = self._bench.pools[kind].units
            for at in np.flatnonzero(units != now).tolist():
                if (id(now), at) not in own:
                    self.problems.append(
                        f"prefetch wrote to {kind.name} unit {at}, which is none of its indices"
                    )
        self.answers.append(int(done))
        if done:
            self.prefetched.append(event)
        return done

    def write_through(self, event: WriteThroughEvent) -> None:
        before = self._pools()
        self._hooks.write_through(event)
        self._check_untouched("write_through", before)
        self._note_given(event)

    def write_back(self, event: WriteBackEvent) -> None:
        before = self._pools()
        self._meanwhile = _MEANWHILE
        self._hooks.write_back(event)
        self._check_untouched("write_back", before)
        self._note_given(event)

    def reset(self) -> None:
        self._hooks.reset()
        self._given.clear()

    # -- what is right -------------------------------------------------------------------------

    def _pools(self) -> dict[ComponentType, Units]:
        return {kind: pool.units.copy() for kind, pool in self._bench.pools.items()}

    def _check_untouched(self, hook: str, before: Mapping[ComponentType, Units]) -> None:
        for kind, units in before.items():
            if not np.array_equal(units, self._bench.pools[kind].units):
                self.problems.append(f"{hook} changed the {kind.name} pool; it may only read there")

    def _note_given(self, event: HiCacheEvent) -> None:
        self._given |= {int(units[at]) for units, at, _ in self._units(event)}

    def _units(self, event: HiCacheEvent) -> Iterator[tuple[Units, int, _Data]]:
        """Array and position of each unit of an event, and the datum that belongs there."""
        for span in event.spans:
            wanted = _wanted(event.key, span.kind, span.start, span.stop)
            for index, data in zip(span.indices.tolist(), wanted, strict=True):
                yield *self._bench.unit((span.kind, event.dp_rank, index)), data

    def _check_loaded(self, found: int, wanted: _Data) -> None:
        numbers = self._bench.numbers
        if found == numbers.number(wanted):
            return
        data = numbers.data(found)
        said = _MARKS.get(found, "other bytes than it was given") if data is None else str(data)
        self.problems.append(f"prefetch of {wanted} brought {said}{self._meanwhile}")

    def _elsewhere(self, data: _Data) -> str:
        """If the tier has this under another name, a word about that."""
        for number in sorted(self._given):
            other = self._bench.numbers.data(number)
            if other and (other.kind, other.prefix[1]) == (data.kind, data.prefix[1]):
                return f"; it was given {other}, and a namespace never shares with another"
        return ""


def _wanted(key: RadixKey, kind: ComponentType, start: int, stop: int) -> Iterable[_Data]:
    """What belongs at each unit of a span."""
    ends = [stop] if kind is ComponentType.RECURRENT else range(start + 1, stop + 1)
    for end in ends:
        yield _Data(kind, (key.namespace, key.data[: TOKEN_BYTES * end]))


def units_of(span: DeviceSpan, dp_rank: int, num_units: int) -> Units:
    """int64[n]: where a span of a rank lies in a device pool of ``num_units`` per rank."""
    return span.indices.astype(np.int64) + dp_rank * num_units
