"""TreeWalker: how far a key leads into the tree, and why no farther; changes nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import MissReason

_GHOST_LIMIT = 4096


@dataclass(slots=True)
class Walk:
    """How far a key leads into the tree.

    ``path`` has the nodes in order, the last possibly matched in part, and holds ``full_len``
    tokens of the key; the best hit ends ``best_len`` tokens deep, at ``path[best_count - 1]``.
    """

    path: list[UnifiedTreeNode]
    full_len: int
    best_count: int
    best_len: int
    miss_reason: MissReason | None


class TreeWalker:
    """Finds keys below ``root``; remembers what was evicted lately, to tell it from never seen."""

    def __init__(
        self, root: UnifiedTreeNode, components: Sequence[TreeComponent], page_size: int
    ) -> None:
        self.root = root
        self._components = components
        self._page_size = page_size
        self._ghosts: dict[tuple[int, int, Hashable], None] = {}

    def walk(self, key: RadixKey) -> Walk:
        """Where a hit of ``key`` may end: every component's validator sees every node in order."""
        limit = key.page_floor(self._page_size)
        path, full_len = self.descend(key, limit, self.root)
        validators = [component.match_validator() for component in self._components]
        best_count = best_len = start = 0
        rejected_by = -1
        for count, node in enumerate(path, 1):
            stop = min(node.end, full_len)
            accepted = True
            for index, accepts in enumerate(validators):  # all see every node, in order
                if not accepts(node, stop - start):
                    accepted, rejected_by = False, index
            if accepted:
                best_count, best_len = count, stop
            start = stop
        reason: MissReason | None = None
        if best_len < full_len:
            reason = self._components[rejected_by].miss_reason
        elif best_len < limit:
            reason = self._reason_for_end(key, path, full_len)
        return Walk(path, full_len, best_count, best_len, reason)

    def descend(
        self, key: RadixKey, limit: int, begin: UnifiedTreeNode
    ) -> tuple[list[UnifiedTreeNode], int]:
        """Nodes below ``begin`` that ``key[:limit]`` passes, and how many tokens of it (whole
        pages) are held so far; ``begin``'s own prefix is known to be the key's."""
        path: list[UnifiedTreeNode] = []
        page, page_size, starts_with = key.page, self._page_size, key.starts_with
        pos = begin.end
        child = None
        if begin.children and pos < limit:
            child = begin.children.get(self.child_key(begin, key, pos))
        while child is not None:
            path.append(child)
            if child.end > limit or not starts_with(child.key, pos):
                pos += key.common_len(child.key, pos, limit)
                pos -= pos % page_size
                break
            pos = child.end
            child = child.children.get(page(pos, page_size)) if pos < limit else None
        return path, pos

    def child_key(self, parent: UnifiedTreeNode, key: RadixKey, start: int) -> Hashable:
        """Under what ``parent`` finds the child whose edge is ``key`` from ``start`` on."""
        page = key.page(start, self._page_size)
        return page if parent is not self.root else (key.namespace, page)

    def remember(self, parent: UnifiedTreeNode, child_key: Hashable) -> None:
        """A child was evicted. With the depth, since the parent's end moves when it grows."""
        self._ghosts[parent.id, parent.end, child_key] = None
        if len(self._ghosts) > _GHOST_LIMIT:
            del self._ghosts[next(iter(self._ghosts))]

    def forget(self, parent: UnifiedTreeNode, child_key: Hashable) -> None:
        """A child has its place again."""
        self._ghosts.pop((parent.id, parent.end, child_key), None)

    def _reason_for_end(
        self, key: RadixKey, path: list[UnifiedTreeNode], full_len: int
    ) -> MissReason:
        node = path[-1] if path else self.root
        ghost = (node.id, full_len, self.child_key(node, key, full_len))
        return MissReason.FULL_EVICTED if ghost in self._ghosts else MissReason.NO_PREFIX
