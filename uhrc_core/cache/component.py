"""TreeComponent: the contract a component plugin implements.

The tree owns structure (keys, nodes, order of steps); a component owns its values: which nodes it
accepts in a match, how far a lock reaches, what a split does to its data, and when data is freed.
The core calls every method through this contract; it knows FULL, on which the others rest, and
never asks which of the others it talks to.
"""

# ruff: noqa: B027 - an empty method here is a default: most components have nothing to do there.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from uhrc_core.cache.eviction import CandidateQueue, EvictionPolicy, Rank
from uhrc_core.cache.node import ComponentData, UnifiedTreeNode
from uhrc_core.cache.params import (
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    MissReason,
)
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.pools.allocator import PagedIndexAllocator

if TYPE_CHECKING:
    from uhrc_core.cache.holding import RequestState

#: Called with each node of the path in order and how many of its tokens the key matches; answers
#: whether a hit may end there. One validator serves one walk and may keep state between calls.
MatchValidator = Callable[[UnifiedTreeNode, int], bool]


class StateSlots(NamedTuple):
    """The slots one forward of a request works on.

    Attributes:
        running: read and rewritten; nothing of use in it while the request has computed nothing.
        track: also gets the forward's final state; ``None``: not needed.
        clone_src: the snapshot to copy into ``running`` before the forward; ``None``: copied.
    """

    running: int
    track: int | None
    clone_src: int | None


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
        self.peers: tuple[TreeComponent, ...] = ()
        self.queues = tuple(
            CandidateQueue(self.kind, self.rank, self.is_candidate)
            for _ in range(allocator.dp_size)
        )

    def join(self, components: Sequence[TreeComponent]) -> None:
        """Meet the other components of the tree; called once, when the cache is built."""
        self.peers = tuple(peer for peer in components if peer is not self)

    def data(self, node: UnifiedTreeNode) -> ComponentData:
        return node.component_data[self.kind]

    @abstractmethod
    def units_at(self, node: UnifiedTreeNode) -> int:
        """How many indices a value at ``node`` has: one per token of the edge, or one slot."""

    def span_start(self, node: UnifiedTreeNode) -> int:
        """Depth from which on a value at ``node`` stands for tokens. Default: the whole edge."""
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

    def check_insert(self, params: InsertParams) -> None:
        """Raise a `CacheError` if this component cannot take its part; nothing has changed yet."""

    def insert_cuts(
        self, params: InsertParams, path: Sequence[UnifiedTreeNode], prefix_len: int
    ) -> Sequence[int]:
        """Depths, whole pages within the key, at which this insert needs a node to end.

        ``path`` has the nodes that hold the key's first ``prefix_len`` tokens, root side first; the
        last may hold more.
        """
        return ()

    @abstractmethod
    def fill(self, node: UnifiedTreeNode, params: InsertParams, now: int) -> None:
        """Give a node that this insert created its value."""

    def overlap(self, node: UnifiedTreeNode, params: InsertParams, now: int) -> None:
        """This insert passes through an existing node (root side first). Default: mark it used."""
        self.policy.touch(self.data(node), now, hit=False)

    def commit(self, node: UnifiedTreeNode, params: InsertParams, now: int) -> bool:
        """A node on this insert's path is complete; those of `insert_cuts` are among them.

        ``False``: what was offered for it was there already, so the caller keeps it.
        """
        return True

    # -- locks --------------------------------------------------------------------------------

    def lock_from(self, node: UnifiedTreeNode) -> int:
        """Depth, whole pages, at which a lock of ``node`` begins; the tree ends a node there first.

        Default: the root.
        """
        return 0

    @abstractmethod
    def acquire(self, node: UnifiedTreeNode) -> object | None:
        """Lock what a holder of ``node`` needs. ``None``: nothing was acquired here."""

    @abstractmethod
    def release(self, node: UnifiedTreeNode, token: object) -> None:
        """Undo one `acquire` of ``node`` that answered ``token``."""

    @abstractmethod
    def locked_by(self, node: UnifiedTreeNode, token: object) -> Iterable[UnifiedTreeNode]:
        """The nodes that an `acquire` of ``node`` with this answer locked; for the audit."""

    # -- eviction -----------------------------------------------------------------------------

    @abstractmethod
    def is_candidate(self, node: UnifiedTreeNode) -> bool:
        """Whether this component's value at ``node`` may be evicted now."""

    def gives_hit(self, node: UnifiedTreeNode) -> bool:
        """Whether a hit may end at ``node`` as far as this component goes. Default: yes."""
        return True

    def rank(self, node: UnifiedTreeNode) -> Rank:
        """Victim order: first what can give no hit any more, then as the policy says."""
        useful = all(peer.gives_hit(node) for peer in self.peers)
        return (int(useful), *self.policy.rank(node, self.data(node)))

    # -- life of a request --------------------------------------------------------------------

    def demand(self, num_tokens: int, live: Sequence[RequestState]) -> int:
        """Units (this component's) that must be free or evictable for a request to be admitted.

        ``num_tokens`` are those that it, and the ``live`` requests of its rank, are to be given.
        """
        return self.allocator.page_ceil(num_tokens)

    def demand_alone(self, num_tokens: int) -> int:
        """Units that a request of ``num_tokens`` needs at most, its locked prefix included."""
        return self.demand(num_tokens, ())

    def admit_demand(self) -> int:
        """Units that `admit` takes at once. Default: none."""
        return 0

    def check_match(self, match: MatchResult) -> None:
        """Raise `StaleNodeError` if ``match`` no longer holds for this component's data."""

    def admit(self, state: RequestState, match: MatchResult) -> bool:
        """Take what the request owns beside its tokens; ``False``: none was to be had."""
        return True

    def state_slots(self, state: RequestState, start: int, stop: int) -> StateSlots | None:
        """Where a forward over ``[start, stop)`` reads and leaves recurrent state, if this
        component holds any."""
        return None

    def started(self, state: RequestState) -> None:
        """The copy that `StateSlots.clone_src` asked for has been dispatched."""

    def token_indices(self, state: RequestState, stop: int) -> IndexArray | None:
        """int32[stop]: where this component's pool has the request's first ``stop`` tokens.

        -1 where it need not have one any more; ``None``: a pool without an index per token.
        """
        return None

    def needs_lock(self, state: RequestState) -> bool:
        """Whether the request still needs this component's part of its lock on its prefix."""
        return True

    def cuts(self, state: RequestState, start: int, stop: int) -> Sequence[int]:
        """Positions in ``(start, stop)``, ascending, where a forward of the request must end."""
        return ()

    def check_extend(self, num_tokens: int) -> None:
        """Raise `InvalidParamsError` if no request may be extended by so many tokens at once."""

    def extend_demand(self, state: RequestState, num_tokens: int) -> int:
        """Units that `extend` takes for the request's next ``num_tokens`` tokens.

        Default: a unit a token, in whole pages.
        """
        page_ceil = self.allocator.page_ceil
        return page_ceil(state.allocated_len + num_tokens) - page_ceil(state.allocated_len)

    @abstractmethod
    def extend(self, state: RequestState, num_tokens: int) -> bool:
        """Take pool space for the request's next tokens; ``False``: none was to be had."""

    @abstractmethod
    def undo_extend(self, state: RequestState, num_tokens: int) -> None:
        """Give back what `extend` took, since another component could not follow."""

    def advanced(self, state: RequestState, start: int) -> None:
        """The forward over ``[start, state.computed_len)`` has been dispatched."""

    def publish_demand(self, state: RequestState, *, finished: bool) -> int:
        """Units that publishing would like to have free; it must do without them, too."""
        return 0

    def prepare_publish(self, state: RequestState, seqlen: int, *, finished: bool) -> int:
        """Get ready to insert up to the request's first ``seqlen`` tokens; returns how many may be.

        May take `publish_demand` units; `settle` gives back what the insert did not need.
        """
        return seqlen

    @abstractmethod
    def offer(self, state: RequestState, seqlen: int) -> Mapping[str, Any]:
        """Unclaim what an insert of the request's first ``seqlen`` tokens takes or finds double.

        Returns the fields this component adds to its `InsertParams`; `settle` follows.
        """

    @abstractmethod
    def settle(self, state: RequestState, result: InsertResult) -> None:
        """After an insert: free the request's duplicates, note what the tree took over.

        FULL comes last, so that the others still find the indices that the request offered.
        """

    @abstractmethod
    def end(self, state: RequestState) -> None:
        """Free everything the request still owns; called on every exit, exactly once."""

    @abstractmethod
    def held_by(self, state: RequestState) -> IndexArray:
        """int32[n]: every index the live request owns (not the tree's); for the audit."""

    def problems(
        self, nodes: Sequence[UnifiedTreeNode], live: Sequence[RequestState]
    ) -> Iterable[str]:
        """What is wrong with this component's own state, a line each; for the audit."""
        return ()

    # -- host tier ----------------------------------------------------------------------------

    def host_need(self, hit_len: int, full_len: int, stop: int) -> HostNeed | None:
        """What must come from a host tier for a hit to end at ``stop``, beyond ``hit_len``.

        The device has FULL data of the first ``full_len`` tokens. ``None``: nothing that a tier
        could bring makes such a hit. Default: so it is everywhere.
        """
        return None

    def take_for_host(
        self, need: HostNeed, full_indices: IndexArray, dp_rank: int
    ) -> IndexArray | None:
        """int32[need.num_units] fresh indices, the caller's, to load data to; ``None``: none free.

        ``full_indices`` are those of the tokens up to ``need.stop``, FULL's own turn excepted.
        """
        return self.allocator.alloc(need.num_units, dp_rank)

    def host_fields(self, need: HostNeed, indices: IndexArray) -> Mapping[str, Any]:
        """The fields this component adds to the `InsertParams` of what was loaded."""
        return {}

    # -- bookkeeping for subclasses -------------------------------------------------------------

    def store(self, node: UnifiedTreeNode, value: IndexArray, now: int) -> None:
        """Hand indices the caller owns to the tree at ``node``; copies them."""
        data = self.data(node)
        self.allocator.adopt(value, node.dp_rank, protected=data.lock_ref > 0)
        data.value = value.copy()
        data.hit_count = 0
        self.policy.touch(data, now, hit=False)
        self.reconsider(node)

    def drop(self, node: UnifiedTreeNode) -> int:
        """Free the tree's value at ``node``, leaving a tombstone; returns how many indices."""
        data = self.data(node)
        if data.value is None:
            return 0
        assert data.lock_ref == 0, f"{self.kind.name} data of {node} is locked"
        value, data.value = data.value, None
        self.allocator.reclaim(value, node.dp_rank)
        if data.queued:
            self.queues[node.dp_rank].forget(node)
        for peer in self.peers:
            peer.rank_changed(node)
        return len(value)

    def split_tokens(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode) -> None:
        """`split` of a value with an index per token: cut, if there is one; the rest is copied."""
        above, below = self.data(upper), self.data(lower)
        if below.value is not None:
            # Copies: a slice would keep the whole edge's array alive after one half is evicted.
            above.value = below.value[: len(upper.key)].copy()
            below.value = below.value[len(upper.key) :].copy()
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
        """Queue ``node`` anew, if it is queued: a peer's change may have lowered its rank."""
        if self.data(node).queued:
            self.queues[node.dp_rank].push(node)
