"""The tree's nodes: an edge of tokens and one data slot per component kind."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np

from uhrc_core.cache.key import RadixKey
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType


class ComponentData:
    """What one component holds at one node. ``value is None`` is a tombstone: nothing here.

    Attributes:
        value: int32[n], pool indices owned by the tree: one per token of the edge (FULL, SWA) or
            one slot (RECURRENT). Never written in place: a split or growth replaces it.
        lock_ref: how many holders keep the value from being evicted.
        host_value, host_lock_ref: reserved for a HiCache tier; ``None`` and 0 here.
        last_access_time: the cache's counter at the last refresh; larger is more recent.
        hit_count: refreshes by a match since the data was inserted.
        queued: serial number of this slot's entry in the component's eviction queue; 0: none.
    """

    __slots__ = (
        "hit_count",
        "host_lock_ref",
        "host_value",
        "last_access_time",
        "lock_ref",
        "queued",
        "value",
    )

    def __init__(self) -> None:
        self.value: IndexArray | None = None
        self.lock_ref = 0
        self.host_value: object | None = None
        self.host_lock_ref = 0
        self.last_access_time = 0
        self.hit_count = 0
        self.queued = 0


class UnifiedTreeNode:
    """A node of the radix tree: the tokens between its parent's end and its own.

    Attributes:
        id: creation order in this cache, from 0 (the root); never reused.
        key: the edge's tokens, whole pages; empty only at the root.
        end: depth of the edge's last token + 1, in tokens from the root.
        parent: ``None`` at the root and after eviction.
        children: by the child's first page (below the root: namespace and first page).
        component_data: three slots indexed by `ComponentType`.
        kinds: the kinds of data that the tree has; a node takes them over from its parent.
        priority: the largest priority inserted through this node (for the ``priority`` policy).
    """

    __slots__ = ("children", "component_data", "end", "id", "key", "kinds", "parent", "priority")

    def __init__(
        self, node_id: int, key: RadixKey, parent: UnifiedTreeNode | None, end: int, priority: int
    ) -> None:
        self.id = node_id
        self.key = key
        self.parent = parent
        self.end = end
        self.priority = priority
        self.children: dict[Hashable, UnifiedTreeNode] = {}
        self.component_data = (ComponentData(), ComponentData(), ComponentData())
        self.kinds: tuple[ComponentType, ...] = () if parent is None else parent.kinds

    @classmethod
    def root(cls, kinds: Iterable[ComponentType]) -> UnifiedTreeNode:
        """The root of a tree with these kinds of data."""
        node = cls(0, RadixKey([]), None, end=0, priority=0)
        node.kinds = tuple(kinds)
        return node

    @property
    def start(self) -> int:
        """Depth at which the edge begins, in tokens from the root."""
        return self.end - len(self.key)

    @property
    def dp_rank(self) -> int:
        return self.key.dp_rank

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def may_end_hit(self) -> bool:
        """Whether the node has data of every kind; if not, no hit can end at it."""
        return all(self.component_data[kind].value is not None for kind in self.kinds)

    def path_to_root(self) -> Iterator[UnifiedTreeNode]:
        """This node and its ancestors, deepest first, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def edges(self) -> tuple[RadixKey, ...]:
        """The keys on the way from the root to this node, which make up its prefix; shared."""
        return tuple([node.key for node in self.path_to_root()][::-1])

    def __repr__(self) -> str:
        return f"<node {self.id} [{self.start}:{self.end}) {self.key.namespace!r}>"


def full_indices(path: Sequence[UnifiedTreeNode]) -> IndexArray:
    """int32[n], a copy: the FULL indices along ``path``."""
    values = [node.component_data[ComponentType.FULL].value for node in path]
    return np.concatenate([np.empty(0, np.int32), *(v for v in values if v is not None)])
