"""RadixCache: a prefix tree for FULL attention alone, written to be read, not to be fast.

Tokens are compared in plain loops, and every eviction scans all nodes for the oldest leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

import numpy as np

from uhrc_core.cache import audit
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.events import CacheEvent
from uhrc_core.cache.holding import RequestState
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.locks import Grants
from uhrc_core.cache.node import ComponentData, UnifiedTreeNode
from uhrc_core.cache.params import (
    CacheStats,
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    Insertion,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    MissReason,
)
from uhrc_core.errors import InvalidParamsError, StaleNodeError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.pools.ledger import Owner


class RadixCache(BasePrefixCache):
    """See `BasePrefixCache`. LRU only; records no events and does not tell evicted from unseen."""

    _serves = frozenset({ComponentType.FULL})
    #: What makes a hit shorter than the tokens that the tree holds.
    _limit = MissReason.NO_PREFIX
    _next_id = 1  # not reused after a reset

    def _start_empty(self) -> None:
        self._nodes = [UnifiedTreeNode(0, RadixKey([]), None, end=0, priority=0)]
        self._now = 0
        self._stats = CacheStats()

    # -- match and insert ----------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        path, known = self._find(params.key)
        hit = self._usable(path, known)
        node = self._ending_at(path, hit)
        path = [*node.path_to_root()][::-1]
        self._use(path)
        whole = params.key.page_floor(self.page_size)
        reason = self._limit if hit < known else MissReason.NO_PREFIX
        self._count(params.key, hit, None if hit == whole else reason)
        return MatchResult(
            device_indices=np.concatenate([np.empty(0, np.int32), *map(_value, path)]),
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            full_hit_length=known,
            miss_reason=None if hit == whole else reason,
        )

    def peek_prefix_len(self, key: RadixKey) -> int:
        return self._usable(*self._find(key))

    def _usable(self, path: Sequence[UnifiedTreeNode], known: int) -> int:
        """How many of the ``known`` tokens that the tree holds a request can use."""
        return known

    def _ending_at(self, path: Sequence[UnifiedTreeNode], depth: int) -> UnifiedTreeNode:
        """The node of ``path`` that ends at ``depth``, or one made by a split."""
        holder = next(node for node in path if node.end >= depth)
        return holder if holder.end == depth else self._split(holder, depth)

    def _insert(self, insertion: Insertion, holder: RequestState | None) -> InsertResult:
        key, length = insertion.key, len(insertion.key)
        path, had = self._find(key)
        if insertion.giver is Owner.CALLER:
            self._check_insert(insertion, had)
        new = insertion.indices(had, length)
        self.token_allocator.adopt(new, key.dp_rank, insertion.giver, protected=False)
        self._cut(path, insertion, had)
        node = self._ending_at(path, had)
        for end in self._ends(insertion):
            if node.end < end:
                start = node.end
                node = self._add(key.slice(start, end), node, end)
                _data(node).value = insertion.indices(start, end).copy()
        self._use([*node.path_to_root()][::-1])
        self._stats.insert_count += 1
        self._stats.inserted_num_tokens += length - had
        return InsertResult(prefix_len=had, inserted_len=length, node=node)

    def _check_insert(self, insertion: Insertion, had: int) -> None:
        """Raise for what this cache cannot take; nothing has changed yet."""
        if insertion.start > had:
            raise InvalidParamsError(f"prev_prefix_len: {insertion.start}, the tree has {had}")
        pool = self.token_allocator
        new = pool.pages(insertion.indices(had, len(insertion.key)))
        pool.ledger.check_held(new, insertion.key.dp_rank)

    def _cut(self, path: Sequence[UnifiedTreeNode], insertion: Insertion, had: int) -> None:
        """Split what an insert passes through where other data than FULL begins."""

    def _ends(self, insertion: Insertion) -> Sequence[int]:
        """Where what an insert adds is cut, its end included."""
        return (len(insertion.key),)

    def _find(self, key: RadixKey) -> tuple[list[UnifiedTreeNode], int]:
        """Nodes from the root that ``key`` enters, and how many of its tokens they hold."""
        self.token_allocator.ledger.check_rank(key.dp_rank)
        tokens, path = key.tokens.tolist()[: key.page_floor(self.page_size)], [self._nodes[0]]
        while len(tokens) > path[-1].end:
            start, best = path[-1].end, 0
            for child in list(path[-1].children.values()):
                edge, same = child.key.tokens.tolist(), 0
                if child.key.namespace == key.namespace:
                    while same < min(len(edge), len(tokens) - start) and (
                        edge[same] == tokens[start + same]
                    ):
                        same += 1
                if same >= self.page_size:
                    path.append(child)
                    best = same - same % self.page_size
                    break
            if start + best < path[-1].end or not best:
                return path, start + best
        return path, path[-1].end

    def _split(self, node: UnifiedTreeNode, depth: int) -> UnifiedTreeNode:
        parent, value, at = node.parent, _value(node), depth - node.start
        assert parent is not None
        front, back = node.key.slice(0, at), node.key.slice(at, len(node.key))
        del parent.children[self._child_key(node)]
        upper = self._add(front, parent, depth)
        node.key, node.parent = back, upper
        upper.children[self._child_key(node)] = node
        above, below = _data(upper), _data(node)
        above.value, below.value = value[:at].copy(), value[at:].copy()
        above.lock_ref, above.last_access_time = below.lock_ref, below.last_access_time
        return upper

    def _add(self, edge: RadixKey, parent: UnifiedTreeNode, end: int) -> UnifiedTreeNode:
        node = UnifiedTreeNode(self._next_id, edge, parent, end, priority=0)
        self._next_id += 1
        self._nodes.append(node)
        parent.children[self._child_key(node)] = node
        return node

    def _child_key(self, node: UnifiedTreeNode) -> object:
        page = node.key.page(0, self.page_size)
        return page if node.start else (node.key.namespace, page)

    def _use(self, path: Sequence[UnifiedTreeNode]) -> None:
        """Mark nodes as used, root side first, the root left out."""
        self._now += 1
        for node in path:
            _data(node).last_access_time = self._now

    def _count(self, key: RadixKey, hit: int, reason: MissReason | None) -> None:
        self._stats.match_count += 1
        self._stats.query_num_tokens += len(key)
        self._stats.hit_num_tokens += hit
        if reason is not None:
            self._stats.miss_reasons[reason] += 1

    # -- locks and eviction --------------------------------------------------------------------

    def inc_lock_ref(self, node: UnifiedTreeNode) -> IncLockRefResult:
        if node not in self._nodes:
            raise StaleNodeError(f"{node} is not in this cache; match again")
        return self._receipts.issue(node, self._lock(node))

    def dec_lock_ref(self, node: UnifiedTreeNode, params: DecLockRefParams) -> None:
        self._unlock(node, self._receipts.redeem(node, params))

    def _lock(self, node: UnifiedTreeNode) -> Grants:
        """Lock what a holder of ``node`` needs; what `_unlock` must be told, per component."""
        for part in node.path_to_root():
            _data(part).lock_ref += 1
            if _data(part).lock_ref == 1:
                self.token_allocator.protect(len(part.key), part.dp_rank)
        return (True,) + (None,) * (len(self.components) - 1)

    def _unlock(self, node: UnifiedTreeNode, grants: Grants) -> None:
        for part in node.path_to_root():
            _data(part).lock_ref -= 1
            if _data(part).lock_ref == 0:
                self.token_allocator.unprotect(len(part.key), part.dp_rank)

    def evict(self, params: EvictParams) -> EvictResult:
        self._check_amounts(params)
        pools = {component.kind: component.allocator for component in self.components}
        before = {kind: pool.available_size(params.dp_rank) for kind, pool in pools.items()}
        self._evict(params, before)
        freed = [0] * len(ComponentType)
        for kind, pool in pools.items():
            freed[kind] = pool.available_size(params.dp_rank) - before[kind]
        result = EvictResult(*freed)
        self._stats.evicted += result
        return result

    def _evict(self, params: EvictParams, before: Mapping[ComponentType, int]) -> None:
        """``before``: what was free when the call began."""
        self._evict_until(
            params,
            (ComponentType.FULL, before[ComponentType.FULL]),
            lambda node: node.is_leaf and not _data(node).lock_ref,
            self._remove,
        )

    def _evict_until(
        self,
        params: EvictParams,
        since: tuple[ComponentType, int],
        may_go: Callable[[UnifiedTreeNode], bool],
        drop: Callable[[UnifiedTreeNode], None],
    ) -> None:
        """Drop the first of the nodes that may go, again and again, until enough is free."""
        kind, before = since
        pool = self._pool(kind, params.dp_rank)
        counted = 0 if params.shortfall else before
        while (missing := params.amount(kind) - pool.available_size(params.dp_rank) + counted) > 0:
            rank = [n for n in self._nodes[1:] if n.dp_rank == params.dp_rank and may_go(n)]
            if not rank:
                return
            victim = min(rank, key=lambda node: self._victim_order(node, kind))
            if victim.is_leaf and pool.page_ceil(missing) < len(victim.key):
                self._split(victim, victim.end - pool.page_ceil(missing))  # its tail is enough
            drop(victim)

    def _victim_order(self, node: UnifiedTreeNode, kind: ComponentType) -> tuple[int, ...]:
        return (node.component_data[kind].last_access_time, node.id)

    def _remove(self, leaf: UnifiedTreeNode) -> None:
        """Free a leaf's data and take it out of the tree."""
        assert leaf.parent is not None
        self.token_allocator.reclaim(_value(leaf), leaf.dp_rank)
        del leaf.parent.children[self._child_key(leaf)]
        leaf.parent = None
        self._nodes.remove(leaf)

    # -- state ---------------------------------------------------------------------------------

    def nodes(self) -> list[UnifiedTreeNode]:
        return list(self._nodes)

    def clock(self) -> int:
        return self._now

    def check_invariants(
        self, held: Mapping[ComponentType, Sequence[IndexArray]] | None = None
    ) -> None:
        audit.check_invariants(self, held or {})

    def digest(self) -> str:
        return audit.digest(self)

    def stats(self) -> CacheStats:
        return deepcopy(self._stats)

    def take_events(self) -> list[CacheEvent]:
        return []

    def pretty_print(self) -> str:
        return audit.render(self)


def _data(node: UnifiedTreeNode) -> ComponentData:
    return node.component_data[ComponentType.FULL]


def _value(node: UnifiedTreeNode) -> IndexArray:
    value = _data(node).value
    assert value is not None
    return value
