"""UnifiedRadixCache: one radix tree whose nodes carry a data slot per component.

The tree knows keys, nodes, receipts and the order of steps. What a slot holds, who may evict it,
and how far a lock reaches is the component's business (`TreeComponent`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from uhrc_core.cache import audit
from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.events import CacheEvent, EventKind, EventLog
from uhrc_core.cache.holding import RequestState
from uhrc_core.cache.host_loading import HostTierCache
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode, full_indices
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
)
from uhrc_core.cache.reclaim import Reclaimed
from uhrc_core.cache.walk import TreeWalker, Walk
from uhrc_core.errors import InvalidParamsError, StaleNodeError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType

#: A request's own leaf grows with it up to this many tokens. A match then passes few nodes, and a
#: publish copies a bounded piece, so that a prompt's cost stays linear in its length.
EDGE_TOKENS_MAX = 16_384


class UnifiedRadixCache(HostTierCache):
    """The unified hybrid radix cache (RFC 4.1). See `BasePrefixCache` for the arguments."""

    _next_node_id = 1  # not reused after a reset

    def _start_empty(self) -> None:
        self._eviction_order = sorted(self.components, key=lambda c: c.eviction_priority)
        self._root = UnifiedTreeNode.root(component.kind for component in self.components)
        self._nodes = {0: self._root}
        self._now = 0
        self._walker = TreeWalker(self._root, self.components, self.page_size)
        self._stats = CacheStats()
        self._events = EventLog()

    # -- match ---------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix of ``params.key`` that every component can serve.

        Refreshes what the hit consumed and, when it ends inside an edge, splits the edge there.
        Lock ``best_match_node`` before anything evicts.
        """
        walk = self._walk(params.key)
        self._count_match(params.key, walk)
        return self._use(walk, params)

    def _use(self, walk: Walk, params: MatchPrefixParams) -> MatchResult:
        self._now += 1
        path = walk.path[: walk.best_count]
        if path and path[-1].end > walk.best_len:
            path[-1] = self._split(path[-1], walk.best_len)
        for component in self.components:
            component.refresh(path, self._now)
        best = path[-1] if path else self._root
        result = MatchResult(
            device_indices=full_indices(path),
            last_device_node=best,
            last_host_node=best,
            best_match_node=best,
            full_hit_length=walk.full_len,
            miss_reason=walk.miss_reason,
        )
        for component in self.components:
            component.finalize_match(result, params)
        return result

    def peek_prefix_len(self, key: RadixKey) -> int:
        return self._walk(key).best_len

    def _walk(self, key: RadixKey) -> Walk:
        self.token_allocator.ledger.check_rank(key.dp_rank)
        return self._walker.walk(key)

    def _count_match(self, key: RadixKey, walk: Walk) -> None:
        stats = self._stats
        stats.match_count += 1
        stats.query_num_tokens += len(key)
        stats.hit_num_tokens += walk.best_len
        if walk.miss_reason is not None:
            stats.miss_reasons[walk.miss_reason] += 1

    # -- insert --------------------------------------------------------------------------------

    def _insert(self, insertion: Insertion, holder: RequestState | None) -> InsertResult:
        """Walk the known prefix (a bulk comparison), copy the new suffix.

        A request's walk begins where its lock is, and its own last node grows with it.
        """
        key, length = insertion.key, len(insertion.key)
        begin = self._root if holder is None else holder.lock.node
        below, prefix_len = self._walker.descend(key, length, begin)
        if holder is None:
            self._check_insert(insertion, prefix_len)
        cuts = self._cuts(insertion, below, prefix_len)
        self._now += 1
        insertion.now = self._now
        for node in [*begin.path_to_root()][::-1]:
            self._pass(node, insertion)
        node, ends = begin, [begin] if begin.parent is not None else []
        for child in below:
            stops = [cut for cut in cuts if child.start < cut < min(child.end, prefix_len)]
            for stop in [*stops, min(child.end, prefix_len)]:
                node = self._split(child, stop) if stop < child.end else child
                self._pass(node, insertion)
                ends.append(node)
        leaf = None if holder is None else holder.leaf
        for stop in (*[cut for cut in cuts if prefix_len < cut < length], length):
            if node.end == stop:
                continue
            if node is leaf and self._may_grow(node, stop, insertion):
                self._grow(node, stop, insertion)
                leaf = None  # what lies beyond a cut is another node's
            else:
                node = self._append(node, key.slice(node.end, stop), insertion)
                ends.append(node)
        taken = [c.commit(end, insertion) for end in ends for c in self.components]
        self._stats.insert_count += 1
        self._stats.inserted_num_tokens += length - prefix_len
        self._stats.inserted_num_snapshots += insertion.recurrent_value is not None and all(taken)
        return InsertResult(prefix_len, length, node, recurrent_exist=not all(taken))

    def _check_insert(self, insertion: Insertion, prefix_len: int) -> None:
        """Raise for what a caller offers and cannot be taken; nothing has changed yet."""
        key, length = insertion.key, len(insertion.key)
        if insertion.start > prefix_len:
            raise InvalidParamsError(
                f"prev_prefix_len: {insertion.start} must be at most the {prefix_len} tokens of "
                "this key that the tree holds"
            )
        new = self.token_allocator.pages(insertion.indices(prefix_len, length))
        self.token_allocator.ledger.check_held(new, key.dp_rank)
        for component in self.components:
            component.check_insert(insertion)

    def _cuts(
        self, insertion: Insertion, path: Sequence[UnifiedTreeNode], prefix_len: int
    ) -> Sequence[int]:
        """Where nodes must end, ascending; raises if that cannot be, and nothing has changed."""
        length, cuts = len(insertion.key), list[int]()
        for component in self.components:
            for cut in component.insert_cuts(insertion, path, prefix_len):
                if cut % self.page_size or not 0 < cut <= length:
                    raise InvalidParamsError(
                        f"{component.kind.name}: seqlen {cut} must be whole pages of "
                        f"{self.page_size} within the key's {length} tokens"
                    )
                cuts.append(cut)
        return sorted(set(cuts)) if cuts else ()

    def _pass(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        """An insert passes through an existing node."""
        node.priority = max(node.priority, insertion.priority)
        for component in self.components:
            component.overlap(node, insertion)

    def _append(
        self, parent: UnifiedTreeNode, edge: RadixKey, insertion: Insertion
    ) -> UnifiedTreeNode:
        node = self._new_node(edge, parent, parent.end + len(edge), insertion.priority)
        child_key = self._walker.child_key(parent, edge, 0)
        parent.children[child_key] = node
        self._walker.forget(parent, child_key)
        for component in self.components:
            component.fill(node, insertion)
        self._events.add(EventKind.STORED, node.id, parent.id, edge)
        return node

    def _may_grow(self, leaf: UnifiedTreeNode, stop: int, insertion: Insertion) -> bool:
        """Whether the request's own leaf may take on the tokens up to ``stop``.

        Only while the request alone has locked it: another holder has locked just the tokens that
        were there. A match that ends there and is not locked yet remembers its length
        (`_node_of`).
        """
        return (
            not leaf.children
            and leaf.component_data[0].lock_ref == 1  # FULL's
            and stop - leaf.start <= EDGE_TOKENS_MAX
            and all([component.may_grow(leaf, insertion) for component in self.components])
        )

    def _grow(self, leaf: UnifiedTreeNode, stop: int, insertion: Insertion) -> None:
        more = insertion.key.slice(leaf.end, stop)
        self._walker.forget(leaf, self._walker.child_key(leaf, more, 0))
        leaf.key = RadixKey.joined((leaf.key, more))
        leaf.end = stop
        for component in self.components:
            component.grow(leaf, insertion)
        self._events.add(EventKind.GROWN, leaf.id, key=more)

    def _split(self, node: UnifiedTreeNode, depth: int) -> UnifiedTreeNode:
        """Put a new node between ``node`` and its parent that ends at ``depth``; returns it."""
        parent = node.parent
        assert parent is not None and node.start < depth < node.end
        at = depth - node.start
        edge = node.key
        upper = self._new_node(edge.slice(0, at), parent, depth, node.priority)
        node.key = edge.slice(at, len(edge))
        node.parent = upper
        parent.children[self._walker.child_key(parent, edge, 0)] = upper
        upper.children[self._walker.child_key(upper, node.key, 0)] = node
        for component in self.components:
            component.split(upper, node)
        self._events.add(EventKind.SPLIT, node.id, upper.id, upper.key)
        return upper

    def _new_node(
        self, edge: RadixKey, parent: UnifiedTreeNode, end: int, priority: int
    ) -> UnifiedTreeNode:
        node = UnifiedTreeNode(self._next_node_id, edge, parent, end, priority)
        self._next_node_id += 1
        self._nodes[node.id] = node
        return node

    # -- locks ---------------------------------------------------------------------------------

    def inc_lock_ref(self, node: UnifiedTreeNode) -> IncLockRefResult:
        """Keep everything a holder of ``node`` needs from being evicted.

        May split ancestors, so that no more is locked than that.

        Raises:
            StaleNodeError: the node was evicted or is another cache's.
        """
        self._check_node(node)
        for depth in {component.lock_from(node) for component in self.components} - {0}:
            self._end_node_at(depth, node)
        grants = tuple([component.acquire(node) for component in self.components])
        return self._receipts.issue(node, grants)

    def dec_lock_ref(self, node: UnifiedTreeNode, params: DecLockRefParams) -> None:
        """Undo one `inc_lock_ref` of ``node``.

        Raises:
            ReceiptError: the receipt was used already, was given for another node, or is unknown.
        """
        grants = self._receipts.redeem(node, params)
        for component, grant in zip(self.components, grants, strict=True):
            if grant is not None:
                component.release(node, grant)

    def _end_node_at(self, depth: int, below: UnifiedTreeNode) -> None:
        """See to it that a node ends at ``depth`` on the path to ``below``."""
        for node in below.path_to_root():
            if node.start <= depth:
                if node.start < depth < node.end:
                    self._split(node, depth)
                return

    def _node_of(self, match: MatchResult) -> UnifiedTreeNode:
        self._check_node(match.best_match_node)
        for node in match.best_match_node.path_to_root():
            if node.start < match.hit_len:
                return node if node.end == match.hit_len else self._split(node, match.hit_len)
        return self._root

    def _check_node(self, node: UnifiedTreeNode) -> None:
        if not isinstance(node, UnifiedTreeNode) or self._nodes.get(node.id) is not node:
            raise StaleNodeError(
                f"{node} is not in this cache (evicted, or another cache's); match again"
            )

    # -- evict ---------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Reclaim per component, lowest internal priority first (RFC 5.2).

        A victim on an internal node takes the data of lower priority with it; on a leaf all goes
        and the node is deleted, or just its tail where that is enough. What is locked stays.
        Answers what was freed, cascades included.
        """
        self._check_amounts(params)
        gone = Reclaimed(self.components, params.dp_rank)
        try:
            for component in self._eviction_order:
                self._evict_for(component, params, gone)
        finally:
            freed = gone.free()
            self._stats.evicted += freed
        return freed

    def _evict_for(self, component: TreeComponent, params: EvictParams, gone: Reclaimed) -> None:
        """Drop victims of one component until it has what was asked for, or none is left."""
        queue, goal = component.queues[params.dp_rank], params.amount(component.kind)
        if params.shortfall:
            goal -= component.allocator.available_size(params.dp_rank)
        while (missing := goal - gone.counts[component.kind]) > 0:
            victim = queue.pop()
            if victim is None:
                return
            try:
                self._keep_front(victim, component.allocator.page_ceil(missing))
                self._evict_from(victim, component, gone)
            except BaseException:  # an interrupt of a host tier; its faults are contained
                component.reconsider(victim)
                raise

    def _keep_front(self, victim: UnifiedTreeNode, num_tokens: int) -> None:
        """Where a leaf has more tokens than are needed, let its front be a node of its own.

        A leaf with a snapshot stays whole: the snapshot stands for its end and not for its tokens,
        so the front would give no hit.
        """
        size = len(victim.key)
        if num_tokens < size and victim.is_leaf:
            values = (data.value for data in victim.component_data)
            if all(value is None or len(value) == size for value in values):
                self._split(victim, victim.end - num_tokens)

    def _evict_from(self, node: UnifiedTreeNode, trigger: TreeComponent, gone: Reclaimed) -> None:
        """Drop ``trigger``'s data at ``node`` and all that must or may go with it."""
        victims: list[TreeComponent] = []
        for component in self.components:
            data = component.data(node)
            higher = component.eviction_priority >= trigger.eviction_priority
            if component is trigger or not (
                data.value is None or (higher and (data.lock_ref or not node.is_leaf))
            ):
                victims.append(component)
        self.hicache.write_back(node, victims)
        gone.take(node, victims)
        if node.is_leaf:
            self._delete_empty_leaves(node)

    def _delete_empty_leaves(self, leaf: UnifiedTreeNode) -> None:
        """Unlink ``leaf`` if it holds nothing, then its ancestors that were left bare."""
        node = leaf
        while node.parent is not None and node.is_leaf:
            if any(data.value is not None or data.lock_ref for data in node.component_data):
                for component in self.components:
                    component.reconsider(node)
                return
            node = self._unlink(node)

    def _unlink(self, node: UnifiedTreeNode) -> UnifiedTreeNode:
        """Take a leaf out of the tree and return its former parent."""
        parent = node.parent
        assert parent is not None and not node.children
        child_key = self._walker.child_key(parent, node.key, 0)
        del parent.children[child_key]
        del self._nodes[node.id]
        node.parent = None
        self._walker.remember(parent, child_key)
        self._events.add(EventKind.REMOVED, node.id)
        return parent

    # -- state ---------------------------------------------------------------------------------

    def nodes(self) -> list[UnifiedTreeNode]:
        return list(self._nodes.values())

    def clock(self) -> int:
        return self._now

    def check_invariants(
        self, held: Mapping[ComponentType, Sequence[IndexArray]] | None = None
    ) -> None:
        queues = audit.queue_problems(self.components, self.nodes())
        audit.check_invariants(self, held or {}, queues)

    def digest(self) -> str:
        return audit.digest(self)

    def stats(self) -> CacheStats:
        return copy.deepcopy(self._stats)

    def take_events(self) -> list[CacheEvent]:
        return self._events.take(self.nodes()[1:])

    def pretty_print(self) -> str:
        return audit.render(self)
