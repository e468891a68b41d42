"""Victim order: a policy ranks nodes, a queue finds the lowest-ranked candidate in O(log n).

Each component keeps one queue per dp rank, a heap of ``(rank, node id, node)``. Entries are lazy:
a refresh changes only the node, never the heap. So an entry's rank is a lower bound of the node's
present rank (a policy's ranks only grow while a node stays a candidate), and the queue settles it
when the entry surfaces:

1. the node is no longer a candidate (locked, evicted, grown children): the entry is dropped;
2. its rank has grown: it goes back with the new one;
3. otherwise it is the victim. Ties go to the older node, so every host picks the same one.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable

from uhrc_core.node import ComponentData, ComponentType, UnifiedTreeNode

Rank = tuple[int, ...]

_COMPACT_FLOOR = 64


class EvictionPolicy(ABC):
    """Orders the values of one component; stateless, so it can be shared by all ranks."""

    @abstractmethod
    def rank(self, node: UnifiedTreeNode, data: ComponentData) -> Rank:
        """Sort key; the smallest goes first. Must not shrink while the node is a candidate."""

    def touch(self, data: ComponentData, now: int, *, hit: bool) -> None:
        """Record a use at time ``now``: by a match (``hit``) or by an insert."""
        data.last_access_time = now
        data.hit_count += hit


class LRU(EvictionPolicy):
    """Least recently used first."""

    def rank(self, node: UnifiedTreeNode, data: ComponentData) -> Rank:
        return (data.last_access_time,)


class LFU(EvictionPolicy):
    """Least often hit first; among equals the least recent."""

    def rank(self, node: UnifiedTreeNode, data: ComponentData) -> Rank:
        return (data.hit_count, data.last_access_time)


class SLRU(EvictionPolicy):
    """Segmented LRU: what was hit at least ``protect_hits`` times goes after all that was not."""

    def __init__(self, protect_hits: int = 2) -> None:
        self.protect_hits = protect_hits

    def rank(self, node: UnifiedTreeNode, data: ComponentData) -> Rank:
        return (int(data.hit_count >= self.protect_hits), data.last_access_time)


class FIFO(EvictionPolicy):
    """Oldest node first, whatever its use."""

    def rank(self, node: UnifiedTreeNode, data: ComponentData) -> Rank:
        return (node.id,)


class Priority(EvictionPolicy):
    """Lowest request priority first; among equals the least recent."""

    def rank(self, node: UnifiedTreeNode, data: ComponentData) -> Rank:
        return (node.priority, data.last_access_time)


class CandidateQueue:
    """The candidates of one component on one dp rank. A node has at most one entry."""

    __slots__ = ("_heap", "_is_candidate", "_kind", "_policy", "_stale")

    def __init__(
        self,
        kind: ComponentType,
        policy: EvictionPolicy,
        is_candidate: Callable[[UnifiedTreeNode], bool],
    ) -> None:
        self._kind = kind
        self._policy = policy
        self._is_candidate = is_candidate
        self._heap: list[tuple[Rank, int, UnifiedTreeNode]] = []
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: UnifiedTreeNode) -> None:
        """Add a candidate; the caller has set its slot's ``queued``."""
        rank = self._policy.rank(node, node.component_data[self._kind])
        heapq.heappush(self._heap, (rank, node.id, node))

    def pop(self) -> UnifiedTreeNode | None:
        """Remove and return the victim, or ``None`` when nothing can be evicted."""
        heap, policy = self._heap, self._policy
        while heap:
            rank, node_id, node = heap[0]
            data = node.component_data[self._kind]
            if not self._is_candidate(node):
                heapq.heappop(heap)
                data.queued = False
                self._stale -= self._stale > 0
                continue
            current = policy.rank(node, data)
            if current > rank:
                heapq.heapreplace(heap, (current, node_id, node))
                continue
            heapq.heappop(heap)
            data.queued = False
            return node
        return None

    def forget_one(self) -> None:
        """Note that an entry's node has left the tree; compacts when such entries prevail.

        A dead entry would otherwise keep its node's memory until it surfaces.
        """
        self._stale += 1
        if self._stale > _COMPACT_FLOOR and self._stale * 2 > len(self._heap):
            self._compact()

    def clear(self) -> None:
        """Drop every entry."""
        self._heap.clear()
        self._stale = 0

    def candidates(self) -> list[UnifiedTreeNode]:
        """The nodes that may be evicted now, in no particular order; for the audit."""
        return [node for _, _, node in self._heap if self._is_candidate(node)]

    def _compact(self) -> None:
        live: list[tuple[Rank, int, UnifiedTreeNode]] = []
        for entry in self._heap:
            if self._is_candidate(entry[2]):
                live.append(entry)
            else:
                entry[2].component_data[self._kind].queued = False
        heapq.heapify(live)
        self._heap = live
        self._stale = 0
