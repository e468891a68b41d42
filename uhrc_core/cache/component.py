"""TreeComponent: the contract's first half, what a component answers for the tree.

The tree owns structure (keys, nodes, order of steps); a component owns its values: which nodes it
accepts in a match, how far a lock reaches, what a split does to its data, and when data is freed.
For each request that is admitted it makes a `Holding`, the contract's other half. The core calls
every method through these two; it knows FULL, on which the others rest, and never asks which of the
others it talks to.
"""

# ruff: noqa: B027 - an empty method here is a default: most components have nothing to do there.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from uhrc_core.cache.eviction import CandidateQueue, EvictionPolicy, Rank
from uhrc_core.cache.holding import Holding, RequestState
from uhrc_core.cache.node import ComponentData, UnifiedTreeNode
from uhrc_core.cache.params import Insertion, MatchPrefixParams, MatchResult, MissReason
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedIndexAllocator

#: Called with each node of the path in order and how many of its tokens the key matches; answers
#: whether a hit may end there. One validator serves one walk and may keep state between calls.
MatchValidator = Callable[[UnifiedTreeNode, int], bool]


class HostNeed(NamedTuple):
    """What a host tier must hold of one component for a hit to end at some depth.

    Attributes:
        start, stop: tokens ``[start, stop)``, whole pages; ``start == stop`` for RECURRENT: the
            state after exactly ``stop`` tokens.
        num_units: indices it takes on the device; 0: the device has it all.
    """

    kind: ComponentType
    start: int
    stop: int
    num_units: int


class TreeComponent(ABC):
    """One kind of cached data in the tree. Subclasses decide; this base does the bookkeeping.

    Args:
        allocator: the index space of this component, one per dp rank; the component is the only
            one to free indices the tree owns.
        policy: victim order.
        eviction_priority: on internal nodes; higher is reclaimed later. Leaves always count 0.
    """

    kind: ComponentType
    #: What `MatchResult.miss_reason` says when this component is the one that limits a hit.
    miss_reason: MissReason

    def __init__(
        self, allocator: PagedIndexAllocator, policy: EvictionPolicy, eviction_priority: int
    ) -> None:
        self.allocator = allocator
        self.policy = policy
        self.eviction_priority = eviction_priority
        self.queues = tuple(
            CandidateQueue(self.kind, self.rank, self.is_candidate)
            for _ in range(allocator.dp_size)
        )

    def data(self, node: UnifiedTreeNode) -> ComponentData:
        return node.component_data[self.kind]

    @abstractmethod
    def units_at(self, node: UnifiedTreeNode) -> int:
        """How many indices a value at ``node`` has: one per token of the edge, or one slot."""

    def span_start(self, node: UnifiedTreeNode) -> int:
        """The depth where the tokens begin that a value at ``node`` stands for.

        By default that is the node's start.
        """
        return node.start

    # -- matching -----------------------------------------------------------------------------

    @abstractmethod
    def match_validator(self) -> MatchValidator:
        """A fresh validator for one walk from the root."""

    @abstractmethod
    def refresh(self, path: Sequence[UnifiedTreeNode], now: int) -> None:
        """Mark as used what a hit on ``path`` (root side first, best node last) consumed."""

    def finalize_match(self, result: MatchResult, params: MatchPrefixParams) -> None:
        """Add this component's fields to a result; everything else in it is final."""

    # -- structure ----------------------------------------------------------------------------

    @abstractmethod
    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode) -> None:
        """Share ``lower``'s data with the new node ``upper`` that took the front of its edge.

        Both keys are cut already; ``lower`` keeps its identity, its locks and its depth.
        """

    def check_insert(self, insertion: Insertion) -> None:
        """Raise a `CacheError` if this component cannot take what a caller offers it; nothing has
        changed yet. Not asked about a live request's publish."""

    def insert_cuts(
        self, insertion: Insertion, path: Sequence[UnifiedTreeNode], prefix_len: int
    ) -> Sequence[int]:
        """Depths, whole pages within the key, at which this insert needs a node to end.

        ``path`` has the nodes that hold the key's first ``prefix_len`` tokens, root side first; the
        last may hold more. Nodes before ``insertion.start`` may be missing.
        """
        return ()

    @abstractmethod
    def fill(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        """Give a node that this insert created its value."""

    def overlap(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        """This insert passes through an existing node; called root side first.

        By default this marks the node as used.
        """
        self.policy.touch(self.data(node), insertion.now, hit=False)

    def may_grow(self, node: UnifiedTreeNode, insertion: Insertion) -> bool:
        """Whether ``node``, a leaf that the request itself published and locked, may take on the
        tokens that follow, instead of a new node below it; `grow` follows if all components say so.

        By default it may not: what this component has at the node stays as it is.
        """
        return False

    def grow(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        """The node's edge is longer now: give it the value of the tokens it lacks."""

    def commit(self, node: UnifiedTreeNode, insertion: Insertion) -> bool:
        """A node on this insert's path is complete; those of `insert_cuts` are among them.

        ``False``: what was offered for it was there already, so the caller keeps it.
        """
        return True

    # -- locks --------------------------------------------------------------------------------

    def lock_from(self, node: UnifiedTreeNode) -> int:
        """Depth, whole pages, at which a lock of ``node`` begins; the tree ends a node there first.

        By default this is 0, the root.
        """
        return 0

    @abstractmethod
    def acquire(self, node: UnifiedTreeNode) -> object | None:
        """Lock what a holder of ``node`` needs. ``None``: nothing was acquired here."""

    @abstractmethod
    def release(self, node: UnifiedTreeNode, grant: object) -> None:
        """Undo one `acquire` of ``node`` that answered ``grant``."""

    @abstractmethod
    def locked_by(self, node: UnifiedTreeNode, grant: object) -> Iterable[UnifiedTreeNode]:
        """The nodes that an `acquire` of ``node`` with this answer locked; for the audit."""

    # -- eviction -----------------------------------------------------------------------------

    @abstractmethod
    def is_candidate(self, node: UnifiedTreeNode) -> bool:
        """Whether this component's value at ``node`` may be evicted now."""

    def rank(self, node: UnifiedTreeNode) -> Rank:
        """Victim order: first what can give no hit any more, then as the policy says."""
        return (int(node.may_end_hit), *self.policy.rank(node, self.data(node)))

    # -- admission ----------------------------------------------------------------------------

    def demand(self, num_tokens: int, live: Sequence[RequestState]) -> int:
        """Units (this component's) that must be free or evictable for a request to be admitted.

        ``num_tokens`` counts what this request and the ``live`` ones of its rank are to be given.
        """
        return self.allocator.page_ceil(num_tokens)

    def demand_alone(self, num_tokens: int) -> int:
        """Units that a request of ``num_tokens`` needs at most, its locked prefix included."""
        return self.demand(num_tokens, ())

    def admit_demand(self) -> int:
        """Units that `admit` takes at once; by default none."""
        return 0

    def check_match(self, match: MatchResult) -> None:
        """Raise `StaleNodeError` if ``match`` no longer holds for this component's data."""

    @abstractmethod
    def admit(self, state: RequestState, match: MatchResult) -> Holding | None:
        """Take what the request owns beside its tokens; ``None``: there was no room."""

    # -- audit --------------------------------------------------------------------------------

    def problems(
        self, nodes: Sequence[UnifiedTreeNode], live: Sequence[RequestState]
    ) -> Iterable[str]:
        """What is wrong with this component's own state, a line each; for the audit."""
        return ()

    # -- host tier ----------------------------------------------------------------------------

    def host_need(self, hit_len: int, full_len: int, stop: int) -> HostNeed | None:
        """What must come from a host tier for a hit to end at ``stop``, beyond ``hit_len``.

        The device has FULL data of the first ``full_len`` tokens. ``None``, the default, says that
        nothing a tier could bring makes such a hit.
        """
        return None

    def take_for_host(
        self, need: HostNeed, full_indices: IndexArray, dp_rank: int
    ) -> IndexArray | None:
        """int32[need.num_units] fresh indices, the caller's, to load data to; ``None``: none free.

        FULL is asked first, and gets the FULL indices that the device has. The others get those of
        all tokens up to ``need.stop``.
        """
        return self.allocator.alloc(need.num_units, dp_rank)

    def host_fields(self, need: HostNeed, indices: IndexArray) -> Mapping[str, Any]:
        """The fields this component adds to the `InsertParams` of what was loaded."""
        return {}

    # -- bookkeeping for subclasses -------------------------------------------------------------

    def store(self, node: UnifiedTreeNode, value: IndexArray, insertion: Insertion) -> None:
        """Hand indices of the giver to the tree at ``node``; copies them."""
        data = self.data(node)
        protected = data.lock_ref > 0
        self.allocator.adopt(value, node.dp_rank, insertion.giver, protected=protected)
        data.value = value.copy()
        data.hit_count = 0
        self.policy.touch(data, insertion.now, hit=False)
        self.reconsider(node)

    def append(self, node: UnifiedTreeNode, value: IndexArray, insertion: Insertion) -> None:
        """Hand more indices of the giver to the tree, behind those of ``node``; copies them."""
        data = self.data(node)
        assert data.value is not None
        protected = data.lock_ref > 0
        self.allocator.adopt(value, node.dp_rank, insertion.giver, protected=protected)
        data.value = np.concatenate([data.value, value])
        self.policy.touch(data, insertion.now, hit=False)

    def drop(self, node: UnifiedTreeNode) -> IndexArray | None:
        """Take the tree's value from ``node``, leaving a tombstone; the caller frees it."""
        data = self.data(node)
        value, data.value = data.value, None
        assert value is None or data.lock_ref == 0, f"{self.kind.name} data of {node} is locked"
        if data.queued:
            self.queues[node.dp_rank].forget(node)
        return value

    def split_tokens(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode) -> None:
        """`split` for an index per token: cuts the value, if any, and copies the other fields."""
        above, below = self.data(upper), self.data(lower)
        if below.value is not None:
            # Copies: a slice would keep the whole edge's array alive after one half is evicted.
            at = len(upper.key)
            above.value, below.value = below.value[:at].copy(), below.value[at:].copy()
        above.lock_ref = below.lock_ref
        above.last_access_time = below.last_access_time
        above.hit_count = below.hit_count

    def lock_one(self, node: UnifiedTreeNode) -> None:
        data = self.data(node)
        data.lock_ref += 1
        if data.lock_ref == 1 and data.value is not None:
            self.allocator.protect(len(data.value), node.dp_rank)

    def unlock_one(self, node: UnifiedTreeNode) -> None:
        data = self.data(node)
        assert data.lock_ref > 0, f"{self.kind.name} data of {node} is not locked"
        data.lock_ref -= 1
        if data.lock_ref == 0:
            if data.value is not None:
                self.allocator.unprotect(len(data.value), node.dp_rank)
            self.reconsider(node)

    def reset(self) -> None:
        """Forget all values and free every index."""
        self.allocator.reset()
        for queue in self.queues:
            queue.clear()

    def reconsider(self, node: UnifiedTreeNode) -> None:
        """Queue ``node`` for eviction if it may be evicted and is not queued yet."""
        if not self.data(node).queued and self.is_candidate(node):
            self.queues[node.dp_rank].push(node)

    def rank_changed(self, node: UnifiedTreeNode) -> None:
        """Queue ``node`` anew, if it is queued: it may rank lower now."""
        if self.data(node).queued:
            self.queues[node.dp_rank].push(node)
