"""The host-tier kit: what works passes, and each fault of a tier is called by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from uhrc_core.cache.component import HostNeed
from uhrc_core.cache.host_tier import (
    DeviceSpan,
    HiCacheComponent,
    HiCacheContext,
    HiCacheEvent,
    HiCacheHooks,
    HostQuery,
    PrefetchEvent,
    WriteBackEvent,
    WriteThroughEvent,
)
from uhrc_core.cache.key import RadixKey
from uhrc_core.kinds import ComponentType
from uhrc_core.testing.hicache import CACHES, CopyingTier, HiCacheConformance, HostTierConformance
from uhrc_core.testing.hicache_bench import PaperPool, units_of
from uhrc_hicache_stub.hooks import RecordingHooks

FULL = ComponentType.FULL


class TestRecordingHooks(HiCacheConformance):
    def make_hooks(self, context: HiCacheContext) -> HiCacheHooks:
        return RecordingHooks()


class TestCopyingTier(HostTierConformance):
    def make_hooks(self, context: HiCacheContext) -> HiCacheHooks:
        return CopyingTier(context)


class SmallTier(CopyingTier):
    """Has room for 12 pages and states: it drops those that were stored first."""

    def _store(self, event: HiCacheEvent) -> None:
        super()._store(event)
        for name in list(self._data)[:-12]:
            del self._data[name]


class TestSmallTier(HiCacheConformance):
    def make_hooks(self, context: HiCacheContext) -> HiCacheHooks:
        return SmallTier(context)


class CountedDict(dict[Any, Any]):
    num_looks = 0

    def __contains__(self, key: object) -> bool:
        self.num_looks += 1
        return super().__contains__(key)


def test_a_lookup_of_a_prefix_that_is_held_in_part_looks_once_at_each_page() -> None:
    context = HiCacheContext(1, 1, {FULL: HiCacheComponent(1000, device_pool=PaperPool(1000))})
    tier = CopyingTier(context)
    held = RadixKey(list(range(500)))
    span = DeviceSpan(FULL, 0, 500, np.arange(500, dtype=np.int32), None)
    tier.write_back(WriteBackEvent((held,), 0, 500, (span,)))
    looks = tier._data = CountedDict(tier._data)

    def needs(stop: int) -> tuple[HostNeed, ...]:
        return (HostNeed(FULL, 0, stop, stop),)

    assert tier.lookup(HostQuery(RadixKey(list(range(1000))), 0, needs)) == 500
    assert looks.num_looks == 1000


# -- planted faults ------------------------------------------------------------------------------


class LateTier(CopyingTier):
    """Keeps the indices of evicted data and copies when it is asked next."""

    def __init__(self, context: HiCacheContext) -> None:
        super().__init__(context)
        self._later: list[WriteBackEvent] = []

    def write_through(self, event: WriteThroughEvent) -> None:
        pass

    def write_back(self, event: WriteBackEvent) -> None:
        self._later.append(event)

    def lookup(self, query: HostQuery) -> int:
        while self._later:
            super().write_back(self._later.pop())
        return super().lookup(query)


class ReversingTier(CopyingTier):
    """Brings the pages of a prefix back in the wrong order."""

    def prefetch(self, event: PrefetchEvent) -> bool:
        first, *others = event.spans
        wrong = replace(first, indices=np.flip(first.indices))
        return super().prefetch(replace(event, spans=(wrong, *others)))


class RoundingTier(CopyingTier):
    """Loses the last bit of all it stores."""

    def _store(self, event: HiCacheEvent) -> None:
        super()._store(event)
        for name, ((units,),) in list(self._data.items()):
            self._data[name] = ((units | 1 << 40,),)


class OneNamespaceTier(CopyingTier):
    """Finds data by its tokens alone."""

    def _names(self, key: RadixKey) -> dict[int, bytes]:
        return super()._names(RadixKey(key.tokens))


class RaisingTier(CopyingTier):
    def write_back(self, event: WriteBackEvent) -> None:
        raise OSError("no space left on device")


class BoastingTier(CopyingTier):
    """Says of every prefix that it is there."""

    def lookup(self, query: HostQuery) -> int:
        return len(query.key)


class IdleTier(CopyingTier):
    """Says that it has copied, and has not."""

    def prefetch(self, event: PrefetchEvent) -> bool:
        return True


class SpillingTier(CopyingTier):
    """Writes a page too many."""

    def prefetch(self, event: PrefetchEvent) -> bool:
        done = super().prefetch(event)
        pool = self._pools[FULL]
        mine = {unit for span in event.spans for unit in units_of(span, event.dp_rank, 72)}
        other = next(unit for unit in range(72) if unit not in mine)
        pool.write([other], ((np.array([12345]),),))
        return done


class ScribblingTier(CopyingTier):
    """Sorts the indices of an event in place."""

    def write_back(self, event: WriteBackEvent) -> None:
        super().write_back(event)
        event.spans[0].indices.sort()


class StubbornTier(CopyingTier):
    def reset(self) -> None:
        """Forgets nothing."""


class MoodyTier(CopyingTier):
    """Every other one finds nothing, like a tier whose disk one host has and another has not."""

    made = 0

    def __init__(self, context: HiCacheContext) -> None:
        super().__init__(context)
        MoodyTier.made += 1
        self._blind = MoodyTier.made % 2 == 0

    def lookup(self, query: HostQuery) -> int:
        return 0 if self._blind else super().lookup(query)


class OffPageTier(CopyingTier):
    def lookup(self, query: HostQuery) -> int:
        return len(query.key) + 1


class TrustingTier(SmallTier):
    """Takes for granted that what a lookup saw is there when it is asked for."""

    def prefetch(self, event: PrefetchEvent) -> bool:
        for name, units in self._pieces(event):
            self._pools[name[0]].write(units, self._data[name])
        return True


class PartialTier(SmallTier):
    """Brings what it still has, and says that this is all."""

    def prefetch(self, event: PrefetchEvent) -> bool:
        for name, units in self._pieces(event):
            if name in self._data:
                self._pools[name[0]].write(units, self._data[name])
        return True


ONE_CACHE = {"FULL": CACHES["FULL"]}
WITH_STATES = {"FULL and RECURRENT": CACHES["FULL and RECURRENT"]}
MAKING_ROOM = "test_what_making_room_drops_is_not_brought_back"
EVICTED = "test_what_was_evicted_is_hit_as_if_it_had_stayed"
FAULTS = {
    LateTier: (EVICTED, "after it had been freed: take a copy before write_back returns"),
    RoundingTier: (EVICTED, r"prefetch of FULL after 1 tokens .* brought other bytes than it was"),
    ReversingTier: (EVICTED, r"prefetch of FULL after 1 tokens .* brought FULL after 5 tokens"),
    OneNamespaceTier: (
        "test_namespaces_and_ranks_are_apart",
        r"never given FULL .*'lora', rank 0\); it was given FULL .*\(None, rank 0\), and a "
        "namespace never shares",
    ),
    RaisingTier: (
        EVICTED,
        "write_back raised OSError: no space left on device; the host tier is off",
    ),
    BoastingTier: (
        EVICTED,
        "lookup claims depth 4, but the tier was never given FULL after 1 tokens",
    ),
    IdleTier: (EVICTED, "brought nothing: prefetch answered True and did not write there"),
    SpillingTier: (EVICTED, r"prefetch wrote to FULL unit \d+, which is none of its indices"),
    ScribblingTier: (EVICTED, "write_back raised ValueError: .*read-only"),
    StubbornTier: (
        "test_a_reset_forgets_everything",
        "lookup claims depth 6, but the tier was never given",
    ),
    MoodyTier: ("test_the_same_calls_get_the_same_answers", "hosts in lockstep would part ways"),
    TrustingTier: (
        MAKING_ROOM,
        r"prefetch raised KeyError\(.*since the lookup, room was made by a write_back: if that "
        "dropped what lookup saw, prefetch must answer False",
    ),
    PartialTier: (
        MAKING_ROOM,
        "answered True and did not write there; since the lookup, room was made by a write_back",
    ),
    OffPageTier: (EVICTED, "lookup raised ValueError: depth 5 must be whole pages"),
}


def message_of(
    check: str,
    make_tier: Callable[[HiCacheContext], HiCacheHooks],
    tables: Mapping[str, Mapping[str, Any]] = ONE_CACHE,
) -> str:
    """What a check of the kit says of a tier, which must not pass it."""

    class Suite(HostTierConformance):
        caches = tables

        def make_hooks(self, context: HiCacheContext) -> HiCacheHooks:
            return make_tier(context)

    with pytest.raises(AssertionError) as caught:
        getattr(Suite(), check)()
    return str(caught.value)


@pytest.mark.parametrize("tier", FAULTS, ids=lambda tier: tier.__name__)
def test_a_planted_fault_is_named(tier: type[CopyingTier]) -> None:
    check, message = FAULTS[tier]
    assert re.search(message, message_of(check, tier))


def test_a_tier_that_holds_nothing_is_no_host_tier() -> None:
    said = message_of(EVICTED, lambda context: RecordingHooks())
    assert re.search(r"turns of \(4, 3\) pages hit 5 tokens .* but 0 aft", said)


class StatelessTier(CopyingTier):
    """Keeps KV, and of the states none."""

    def _store(self, event: HiCacheEvent) -> None:
        spans = [span for span in event.spans if span.kind is not ComponentType.RECURRENT]
        super()._store(replace(event, spans=tuple(spans)))


class RefusingTier(CopyingTier):
    """Finds everything and brings nothing."""

    def prefetch(self, event: PrefetchEvent) -> bool:
        return False


@pytest.mark.parametrize(
    ("tier", "answer"),
    [(StatelessTier, "lookup answered 0"), (RefusingTier, "prefetch answered False")],
)
def test_a_state_that_does_not_come_back_is_named(tier: type[CopyingTier], answer: str) -> None:
    said = message_of("test_a_snapshot_comes_back_alone", tier, WITH_STATES)
    assert said == (
        "FULL and RECURRENT: the RECURRENT state after 5 tokens was not brought back: " + answer
    )
