"""SWARadixCache: a prefix tree for FULL and sliding-window attention, written to be read.

Of the SWA component it uses the pool; what a window means is said here once more, in plain loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from uhrc_core.baseline.radix_cache import RadixCache
from uhrc_core.cache.holding import RequestState
from uhrc_core.cache.locks import Grants
from uhrc_core.cache.node import ComponentData, UnifiedTreeNode
from uhrc_core.cache.params import EvictParams, Insertion, InsertResult, MissReason
from uhrc_core.errors import InvalidIndexError, InvalidParamsError
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import SWATokenToKVPoolAllocator


class SWARadixCache(RadixCache):
    """As `RadixCache`; a node without SWA data is a tombstone, and still holds FULL data."""

    _serves = frozenset({ComponentType.FULL, ComponentType.SWA})
    _limit = MissReason.SWA_WINDOW

    @property
    def swa_allocator(self) -> SWATokenToKVPoolAllocator:
        allocator = self._by_kind[ComponentType.SWA].allocator
        assert isinstance(allocator, SWATokenToKVPoolAllocator)
        return allocator

    # -- match ---------------------------------------------------------------------------------

    def _usable(self, path: Sequence[UnifiedTreeNode], known: int) -> int:
        """Up to the last node behind which the window has no gap."""
        usable, gap_end = 0, None
        for node in path[1:]:
            stop = min(node.end, known)
            if _swa(node).value is None:
                gap_end = stop
            elif gap_end is None or stop - gap_end >= self.swa_allocator.window_tokens:
                usable = stop
        return usable

    def _use(self, path: Sequence[UnifiedTreeNode]) -> None:
        super()._use(path)
        for node in path:
            if node.end > path[-1].end - self.swa_allocator.window_tokens:
                _swa(node).last_access_time = self._now

    def _split(self, node: UnifiedTreeNode, depth: int) -> UnifiedTreeNode:
        upper = super()._split(node, depth)
        above, below, at = _swa(upper), _swa(node), len(upper.key)
        if below.value is not None:
            above.value, below.value = below.value[:at].copy(), below.value[at:].copy()
        above.lock_ref, above.last_access_time = below.lock_ref, below.last_access_time
        return upper

    # -- insert --------------------------------------------------------------------------------

    def _insert(self, insertion: Insertion, holder: RequestState | None) -> InsertResult:
        result = super()._insert(insertion, holder)
        for node in result.node.path_to_root():
            if node.start >= insertion.swa_start and _swa(node).value is None:
                self._take(node, insertion)
        return result

    def _cut(self, path: Sequence[UnifiedTreeNode], insertion: Insertion, had: int) -> None:
        begin = insertion.swa_start
        for node in path[1:]:
            if node.start < begin < min(node.end, had) and _swa(node).value is None:
                self._split(node, begin)

    def _ends(self, insertion: Insertion) -> Sequence[int]:
        return (min(insertion.swa_start, len(insertion.key)), len(insertion.key))

    def _check_insert(self, insertion: Insertion, had: int) -> None:
        super()._check_insert(insertion, had)
        if insertion.swa_evicted_seqlen % self.page_size:
            raise InvalidParamsError(
                f"swa_evicted_seqlen: {insertion.swa_evicted_seqlen} is not whole pages"
            )
        pool, rank, length = self.swa_allocator, insertion.key.dp_rank, len(insertion.key)
        begin = min(insertion.swa_start, length)
        if (pool.translate(insertion.indices(insertion.start, begin), rank) >= 0).any():
            raise InvalidIndexError(f"value: some tokens before {begin} have SWA indices")
        offered = pool.translate(insertion.indices(begin, length), rank)
        if (offered < 0).any():
            raise InvalidIndexError(f"value: not all tokens from {begin} on have SWA indices")
        pool.ledger.check_held(pool.pages(offered), rank)

    def _take(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        """The SWA data of the FULL indices offered becomes the node's, under its own."""
        pool, mine = self.swa_allocator, node.component_data[ComponentType.FULL].value
        assert mine is not None
        offered = insertion.indices(node.start, node.end)
        if mine.tolist() != offered.tolist():
            pool.move(offered, mine, node.dp_rank)
        data = _swa(node)
        data.value = pool.translate(mine, node.dp_rank)
        data.last_access_time = self._now
        protected = data.lock_ref > 0
        pool.adopt(data.value, node.dp_rank, insertion.giver, protected=protected)

    # -- locks and eviction --------------------------------------------------------------------

    def _lock(self, node: UnifiedTreeNode) -> Grants:
        """SWA: one window in whole pages and a page."""
        self._ending_at([self.nodes()[0], *[*node.path_to_root()][::-1]], self._kept_from(node))
        (full, _) = super()._lock(node)
        for part in self._kept(node):
            _swa(part).lock_ref += 1
            if _swa(part).lock_ref == 1 and _swa(part).value is not None:
                self.swa_allocator.protect(len(part.key), part.dp_rank)
        return (full, self._kept_from(node))

    def _unlock(self, node: UnifiedTreeNode, grants: Grants) -> None:
        super()._unlock(node, grants)
        if grants[1] is None:
            return  # released early
        for part in self._kept(node):
            _swa(part).lock_ref -= 1
            if _swa(part).lock_ref == 0 and _swa(part).value is not None:
                self.swa_allocator.unprotect(len(part.key), part.dp_rank)

    def _kept_from(self, node: UnifiedTreeNode) -> int:
        pool = self.swa_allocator
        return max(node.end - pool.page_ceil(pool.window_tokens) - self.page_size, 0)

    def _kept(self, node: UnifiedTreeNode) -> Iterator[UnifiedTreeNode]:
        """The node and its ancestors, as far up as a lock reaches."""
        return (part for part in node.path_to_root() if part.end > self._kept_from(node))

    def _evict(self, params: EvictParams, before: Mapping[ComponentType, int]) -> None:
        """First SWA data, of internal nodes alone, of leaves with all they hold; then leaves."""
        self._evict_until(
            params,
            (ComponentType.SWA, before[ComponentType.SWA]),
            lambda node: _swa(node).value is not None and not _swa(node).lock_ref,
            self._drop_window,
        )
        super()._evict(params, before)

    def _victim_order(self, node: UnifiedTreeNode, kind: ComponentType) -> tuple[int, ...]:
        """FULL data at which no hit can end goes first."""
        useless = kind is ComponentType.FULL and _swa(node).value is None
        return (int(not useless), *super()._victim_order(node, kind))

    def _drop_window(self, node: UnifiedTreeNode) -> None:
        if node.is_leaf and not node.component_data[ComponentType.FULL].lock_ref:
            self._remove(node)
        else:
            self._forget_window(node)

    def _remove(self, leaf: UnifiedTreeNode) -> None:
        self._forget_window(leaf)
        super()._remove(leaf)

    def _forget_window(self, node: UnifiedTreeNode) -> None:
        value = _swa(node).value
        if value is not None:
            self.swa_allocator.reclaim(value, node.dp_rank)
            _swa(node).value = None


def _swa(node: UnifiedTreeNode) -> ComponentData:
    return node.component_data[ComponentType.SWA]
