"""CacheEvent: what changed in the tree, for a mirror of it in another process (a router)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode


class EventKind(StrEnum):
    STORED = "stored"
    SPLIT = "split"
    GROWN = "grown"
    REMOVED = "removed"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One structural change; applying all of them in order reproduces the tree's nodes.

    Attributes:
        kind: ``stored``: node ``node_id`` was added under ``parent_id`` with edge ``key``;
            ``split``: the front of ``node_id``'s edge, ``key``, became the new node ``parent_id``
            between it and its former parent; ``grown``: the edge of leaf ``node_id`` goes on with
            ``key``; ``removed``: leaf ``node_id`` is gone; ``reset``: all is.
        node_id, parent_id: ids of this cache; the root is 0.
        key: may share the node's memory; ``None`` for ``removed`` and ``reset``.
    """

    kind: EventKind
    node_id: int = 0
    parent_id: int = 0
    key: RadixKey | None = None


class EventLog:
    """Changes since the last reading, for a reader that may come late or fall behind.

    Nothing is recorded before the first reading, nor beyond ``num_tokens_max`` tokens of edges (an
    event keeps its edge's memory): the next reading then begins with a reset and the whole tree.
    """

    def __init__(self, num_tokens_max: int = 1 << 22) -> None:
        self._num_tokens_max = num_tokens_max
        self._num_tokens = 0
        self._events: list[CacheEvent] | None = None

    def add(
        self, kind: EventKind, node_id: int, parent_id: int = 0, key: RadixKey | None = None
    ) -> None:
        """Record a change; costs nothing while nobody reads."""
        if self._events is None:
            return
        event = CacheEvent(kind, node_id, parent_id, key)
        self._num_tokens += 1 if event.key is None else len(event.key)
        if self._num_tokens > self._num_tokens_max:
            self._events = None
        else:
            self._events.append(event)

    def take(self, nodes: Iterable[UnifiedTreeNode]) -> list[CacheEvent]:
        """Events since the last call, oldest first; or a reset and one event per present node.

        Args:
            nodes: the tree's, the root left out.
        """
        events = self._events
        if events is None:
            events = [CacheEvent(EventKind.RESET), *_from_the_root(nodes)]
        self._events, self._num_tokens = [], 0
        return events


def _from_the_root(nodes: Iterable[UnifiedTreeNode]) -> Iterable[CacheEvent]:
    for node in sorted(nodes, key=lambda node: node.end):
        assert node.parent is not None
        yield CacheEvent(EventKind.STORED, node.id, node.parent.id, node.key)
