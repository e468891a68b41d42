"""RecordingHooks: counts and lists what a host tier is asked and told; holds no data."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from uhrc_core.plugin_api import (
    ComponentType,
    HiCacheEvent,
    HiCacheHooks,
    HostQuery,
    Namespace,
    PrefetchEvent,
    WriteBackEvent,
    WriteThroughEvent,
)


@dataclass(frozen=True, slots=True)
class Record:
    """What one event said, without its tokens and indices, which may be long.

    Attributes:
        event: its type.
        namespace: (extra_key, dp_rank).
        start, stop: its tokens.
        units: by component: how many tokens (FULL, SWA) or slots (RECURRENT) it named.
        num_bytes: of those; ``None`` where no model is known.
    """

    event: type[HiCacheEvent]
    namespace: Namespace
    start: int
    stop: int
    units: Mapping[ComponentType, int]
    num_bytes: int | None


@dataclass(slots=True)
class HookCounts:
    """Totals of one hook: calls, units by component, bytes where the model is known."""

    calls: int = 0
    units: dict[ComponentType, int] = field(default_factory=lambda: dict.fromkeys(ComponentType, 0))
    num_bytes: int = 0


class RecordingHooks(HiCacheHooks):
    """Answers every `lookup` with nothing, so no data is ever asked of it.

    Attributes:
        records: the latest events, oldest first; at most ``num_records_max``.
        lookups, resets: calls.
        write_throughs, write_backs: totals; all four since construction.
    """

    def __init__(self, num_records_max: int = 1024) -> None:
        self.records: deque[Record] = deque(maxlen=num_records_max)
        self.lookups = 0
        self.resets = 0
        self.write_throughs = HookCounts()
        self.write_backs = HookCounts()

    def lookup(self, query: HostQuery) -> int:
        self.lookups += 1
        return 0

    def prefetch(self, event: PrefetchEvent) -> bool:
        """Not called, as `lookup` finds nothing."""
        return False

    def write_through(self, event: WriteThroughEvent) -> None:
        self._note(event, self.write_throughs)

    def write_back(self, event: WriteBackEvent) -> None:
        self._note(event, self.write_backs)

    def reset(self) -> None:
        self.resets += 1

    def _note(self, event: HiCacheEvent, counts: HookCounts) -> None:
        units = dict.fromkeys(event.kinds, 0)
        for span in event.spans:
            units[span.kind] += len(span.indices)
            counts.units[span.kind] += len(span.indices)
        counts.calls += 1
        counts.num_bytes += event.num_bytes or 0
        self.records.append(
            Record(type(event), event.namespace, event.start, event.stop, units, event.num_bytes)
        )
