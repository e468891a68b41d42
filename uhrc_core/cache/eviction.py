"""Victim order: a policy ranks nodes, a queue finds the lowest-ranked candidate in O(log n).

Each component keeps one queue per dp rank, a heap of ``(rank, node id, serial, node)``. Entries are
lazy: a refresh changes only the node, never the heap. So an entry's rank is a lower bound of the
node's present rank (a policy's ranks only grow while a node stays a candidate), and the queue
settles it when the entry surfaces:

1. the node was queued anew or left the tree: the entry is dropped;
2. the node is no longer a candidate (locked, grown children): the entry is dropped;
3. its rank has grown: it goes back with the new one;
4. otherwise it is the victim. Ties go to the older node, so every host picks the same one.

When a rank may have shrunk, the component queues the node anew.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable

from uhrc_core.cache.node import ComponentData, UnifiedTreeNode
from uhrc_core.kinds import ComponentType

Rank = tuple[int, ...]

_SWEEP_FLOOR = 64


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
    """The candidates of one component on one dp rank; a node's latest entry is the one that counts.

    Args:
        kind: whose slot of a node the entries are about.
        rank: present rank of a node; see the module for what it may do.
        is_candidate: whether the node may be evicted now.
    """

    __slots__ = ("_dead", "_heap", "_is_candidate", "_kind", "_rank", "_serial")

    def __init__(
        self,
        kind: ComponentType,
        rank: Callable[[UnifiedTreeNode], Rank],
        is_candidate: Callable[[UnifiedTreeNode], bool],
    ) -> None:
        self._kind = kind
        self._rank = rank
        self._is_candidate = is_candidate
        self._heap: list[tuple[Rank, int, int, UnifiedTreeNode]] = []
        self._serial = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: UnifiedTreeNode) -> None:
        """Queue a candidate; an entry it had before counts no more."""
        data = node.component_data[self._kind]
        if data.queued:
            self.forget(node)
        self._serial += 1
        data.queued = self._serial
        heapq.heappush(self._heap, (self._rank(node), node.id, self._serial, node))

    def pop(self) -> UnifiedTreeNode | None:
        """Remove and return the victim, or ``None`` when nothing can be evicted."""
        heap = self._heap
        while heap:
            rank, node_id, serial, node = heap[0]
            data = node.component_data[self._kind]
            if data.queued != serial:
                heapq.heappop(heap)
                self._dead -= 1
            elif not self._is_candidate(node):
                heapq.heappop(heap)
                data.queued = 0
            elif (current := self._rank(node)) > rank:
                heapq.heapreplace(heap, (current, node_id, serial, node))
            else:
                heapq.heappop(heap)
                data.queued = 0
                return node
        return None

    def forget(self, node: UnifiedTreeNode) -> None:
        """Disown the node's entry; dead entries are swept out before they prevail.

        A dead entry would otherwise keep its node's memory until it surfaces.
        """
        node.component_data[self._kind].queued = 0
        self._dead += 1
        if self._dead > _SWEEP_FLOOR and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
            self._dead = 0

    def clear(self) -> None:
        """Drop every entry."""
        self._heap.clear()
        self._dead = 0

    def candidates(self) -> list[UnifiedTreeNode]:
        """The nodes that may be evicted now, in no particular order; for the audit."""
        live = (entry for entry in self._heap if self._is_live(entry))
        return [node for *_, node in live if self._is_candidate(node)]

    def _is_live(self, entry: tuple[Rank, int, int, UnifiedTreeNode]) -> bool:
        *_, serial, node = entry
        return node.component_data[self._kind].queued == serial
