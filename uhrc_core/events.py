"""CacheEvent: what changed in the tree, for a mirror of it in another process (a router)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from uhrc_core.key import RadixKey


class EventKind(StrEnum):
    STORED = "stored"
    SPLIT = "split"
    REMOVED = "removed"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One structural change; applying all of them in order reproduces the tree's nodes.

    Attributes:
        kind: ``stored``: node ``node_id`` was added under ``parent_id`` with edge ``key``;
            ``split``: the front of ``node_id``'s edge, ``key``, became the new node ``parent_id``
            between it and its former parent; ``removed``: leaf ``node_id`` is gone; ``reset``: all.
        node_id, parent_id: ids of this cache; the root is 0.
        key: shares the node's memory; ``None`` for ``removed`` and ``reset``.
    """

    kind: EventKind
    node_id: int = 0
    parent_id: int = 0
    key: RadixKey | None = None


class EventLog:
    """The latest events, at most ``capacity``; older ones are dropped and counted.

    A reader that sees ``dropped`` grow must rebuild its mirror.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self.dropped = 0

    def add(self, event: CacheEvent) -> None:
        self.dropped += len(self._events) == self._events.maxlen
        self._events.append(event)

    def take(self) -> list[CacheEvent]:
        """All events since the last call, oldest first; the log is empty afterwards."""
        events = list(self._events)
        self._events.clear()
        return events
