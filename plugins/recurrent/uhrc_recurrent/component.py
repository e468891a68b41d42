"""RecurrentComponent: linear-recurrent state (KDA, GDN, GLA …) in the tree.

A value is one slot: the whole state (temporal and conv buffers of every layer) after exactly the
tokens up to the node's end, a *snapshot*. State is rewritten in place, so a hit never shares it:
the request clones the snapshot into a slot of its own (copy-on-write), and only nodes that hold one
can end a hit. Snapshots sit on leaves and internal nodes alike, are locked and evicted one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from uhrc_core.plugin_api import (
    ComponentType,
    EvictionPolicy,
    HostNeed,
    HybridReqToTokenPool,
    IndexArray,
    Insertion,
    InvalidParamsError,
    MatchPrefixParams,
    MatchResult,
    MatchValidator,
    MissReason,
    RequestState,
    StaleNodeError,
    TreeComponent,
    UnifiedTreeNode,
)
from uhrc_recurrent.holding import RecurrentHolding, TrackPlan
from uhrc_recurrent.track import RequestSlots, TrackSlot

_REC = ComponentType.RECURRENT


def _has_snapshot(node: UnifiedTreeNode, num_tokens: int) -> bool:
    return node.component_data[_REC].value is not None and num_tokens == len(node.key)


class RecurrentComponent(TreeComponent):
    """Values are int32[1] slots; see `TreeComponent` for the contract."""

    kind = _REC
    miss_reason = MissReason.NO_SNAPSHOT

    def __init__(
        self,
        pool: HybridReqToTokenPool,
        policy: EvictionPolicy,
        eviction_priority: int,
        plan: TrackPlan,
    ) -> None:
        super().__init__(pool.allocator, policy, eviction_priority)
        self.pool = pool
        self.plan = plan

    def units_at(self, node: UnifiedTreeNode) -> int:
        return 1

    def span_start(self, node: UnifiedTreeNode) -> int:
        """A state stands for no token, but for a position: the node's end."""
        return node.end

    # -- matching ------------------------------------------------------------------------------

    def match_validator(self) -> MatchValidator:
        return _has_snapshot

    def refresh(self, path: Sequence[UnifiedTreeNode], now: int) -> None:
        """Only the consumed snapshot: ancestors left alone age out."""
        if path:
            self.policy.touch(path[-1].component_data[_REC], now, hit=True)

    def finalize_match(self, result: MatchResult, params: MatchPrefixParams) -> None:
        value = result.best_match_node.component_data[_REC].value
        if params.cow_recurrent and value is not None:
            result.recurrent_cow_src = int(value[0])
        grid = self.plan.branching_grid
        seqlen = result.full_hit_length // grid * grid
        result.recurrent_branching_seqlen = seqlen if seqlen > result.hit_len else None

    # -- structure -----------------------------------------------------------------------------

    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode) -> None:
        """The snapshot stays where its sequence ends: at the child."""

    def check_insert(self, insertion: Insertion) -> None:
        slot, seqlen = insertion.recurrent_value, insertion.recurrent_seqlen
        if (slot is None) != (seqlen is None):
            raise InvalidParamsError(
                f"recurrent_value {slot} and recurrent_seqlen {seqlen}: give both or neither"
            )
        if slot is None or seqlen is None:
            return
        self.allocator.ledger.check_held(np.array([slot], np.int32), insertion.key.dp_rank)

    def insert_cuts(
        self, insertion: Insertion, path: Sequence[UnifiedTreeNode], prefix_len: int
    ) -> Sequence[int]:
        return () if insertion.recurrent_seqlen is None else (insertion.recurrent_seqlen,)

    def fill(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        """A snapshot belongs to one position: see `commit`."""

    def may_grow(self, node: UnifiedTreeNode, insertion: Insertion) -> bool:
        """A snapshot stays where its sequence ends."""
        return self.data(node).value is None

    def overlap(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        """Passing a snapshot is no use of it."""

    def commit(self, node: UnifiedTreeNode, insertion: Insertion) -> bool:
        """Store the donated snapshot at the node that ends at its seqlen."""
        if node.end != insertion.recurrent_seqlen or insertion.recurrent_value is None:
            return True
        if self.data(node).value is not None:
            return False
        self.store(node, np.array([insertion.recurrent_value], np.int32), insertion)
        return True

    # -- locks and eviction --------------------------------------------------------------------

    def acquire(self, node: UnifiedTreeNode) -> object | None:
        """Locks the one snapshot, if there is one: the source of a clone."""
        if self.data(node).value is None:
            return None
        self.lock_one(node)
        return True

    def release(self, node: UnifiedTreeNode, grant: object) -> None:
        self.unlock_one(node)

    def locked_by(self, node: UnifiedTreeNode, grant: object) -> Iterable[UnifiedTreeNode]:
        return (node,)

    def is_candidate(self, node: UnifiedTreeNode) -> bool:
        data = node.component_data[_REC]
        return data.value is not None and data.lock_ref == 0

    # -- admission -----------------------------------------------------------------------------

    def demand(self, num_tokens: int, live: Sequence[RequestState]) -> int:
        return self.plan.request_owned_slots

    def demand_alone(self, num_tokens: int) -> int:
        """What it owns, and the snapshot that it is cloned from."""
        return self.plan.request_owned_slots + 1

    def admit_demand(self) -> int:
        return self.plan.request_owned_slots

    def check_match(self, match: MatchResult) -> None:
        node, value = match.best_match_node, self.data(match.best_match_node).value
        # A node that has grown since holds the state of another depth, perhaps in the same slot.
        source = None if value is None or node.end != match.hit_len else int(value[0])
        if match.hit_len and source != match.recurrent_cow_src:
            raise StaleNodeError(
                f"the snapshot after {match.hit_len} tokens was slot {match.recurrent_cow_src} "
                f"when it matched and is {source} now ({node}); match again"
            )

    def admit(self, state: RequestState, match: MatchResult) -> RecurrentHolding | None:
        taken = self.pool.alloc(state.row, self.plan.request_owned_slots, state.dp_rank)
        if taken is None:
            return None
        running, *tracks = taken
        if not tracks and match.recurrent_branching_seqlen is not None:
            # The base path owns no track slot, but keeps the branching state if one is to spare.
            tracks = self.pool.alloc(state.row, 1, state.dp_rank) or []
        slots = RequestSlots(
            running,
            [TrackSlot(slot) for slot in tracks],
            self.plan.interval if self.plan.num_tracks else None,
            clone_src=match.recurrent_cow_src,
            branching_seqlen=match.recurrent_branching_seqlen,
        )
        return RecurrentHolding(state, self.pool, self.plan, slots)

    # -- host tier -----------------------------------------------------------------------------

    def host_need(self, hit_len: int, full_len: int, stop: int) -> HostNeed:
        """The snapshot at ``stop``, wherever that is: a device that had it would have hit it."""
        return HostNeed(_REC, stop, stop, 1)

    def host_fields(self, need: HostNeed, indices: IndexArray) -> Mapping[str, Any]:
        return {"recurrent_value": int(indices[0]), "recurrent_seqlen": need.stop}
