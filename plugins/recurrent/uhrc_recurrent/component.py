"""RecurrentComponent: linear-recurrent state (KDA, GDN, GLA …) in the tree.

A value is one slot: the whole state (temporal and conv buffers of every layer) after exactly the
tokens up to the node's end, a *snapshot*. State is rewritten in place, so a hit never shares it:
the request clones the snapshot into a slot of its own (copy-on-write), and only nodes that hold one
can end a hit. Snapshots sit on leaves and internal nodes alike, are locked and evicted one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uhrc_core.plugin_api import (
    ComponentType,
    EvictionPolicy,
    HostNeed,
    HybridReqToTokenPool,
    IndexArray,
    InsertParams,
    InsertResult,
    InvalidParamsError,
    MatchPrefixParams,
    MatchResult,
    MatchValidator,
    MissReason,
    RequestState,
    StaleNodeError,
    StateSlots,
    TreeComponent,
    UnifiedTreeNode,
)
from uhrc_recurrent.track import RequestSlots, TrackSlot

_REC = ComponentType.RECURRENT


@dataclass(frozen=True, slots=True)
class TrackPlan:
    """How requests keep states for the tree.

    Attributes:
        num_tracks: K track slots a request: 0 on the base path (page_size 1), else 1, or 2 when
            steps overlap.
        interval: tokens between track boundaries; a positive multiple of the page size.
        branching_grid: positions a branching snapshot may be taken at: lcm(page size, the kernel's
            chunk).
    """

    num_tracks: int
    interval: int
    branching_grid: int

    @classmethod
    def make(cls, num_tracks: int, interval: int, page_size: int, kernel_chunk: int) -> TrackPlan:
        return cls(num_tracks, interval, math.lcm(page_size, kernel_chunk))

    @property
    def request_owned_slots(self) -> int:
        """Slots a running request owns: one running and K track slots."""
        return 1 + self.num_tracks


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

    def check_insert(self, params: InsertParams) -> None:
        slot, seqlen = params.recurrent_value, params.recurrent_seqlen
        if (slot is None) != (seqlen is None):
            raise InvalidParamsError(
                f"recurrent_value {slot} and recurrent_seqlen {seqlen}: give both or neither"
            )
        if slot is None or seqlen is None:
            return
        self.allocator.ledger.check_held(np.array([slot], np.int32), params.key.dp_rank)

    def insert_cuts(
        self, params: InsertParams, path: Sequence[UnifiedTreeNode], prefix_len: int
    ) -> Sequence[int]:
        return () if params.recurrent_seqlen is None else (params.recurrent_seqlen,)

    def fill(self, node: UnifiedTreeNode, params: InsertParams, now: int) -> None:
        """A snapshot belongs to one position: see `commit`."""

    def overlap(self, node: UnifiedTreeNode, params: InsertParams, now: int) -> None:
        """Passing a snapshot is no use of it."""

    def commit(self, node: UnifiedTreeNode, params: InsertParams, now: int) -> bool:
        """Store the donated snapshot at the node that ends at its seqlen."""
        if node.end != params.recurrent_seqlen or params.recurrent_value is None:
            return True
        if self.data(node).value is not None:
            return False
        self.store(node, np.array([params.recurrent_value], np.int32), now)
        return True

    # -- locks and eviction --------------------------------------------------------------------

    def acquire(self, node: UnifiedTreeNode) -> object | None:
        """Locks the one snapshot, if there is one: the source of a clone."""
        if self.data(node).value is None:
            return None
        self.lock_one(node)
        return True

    def release(self, node: UnifiedTreeNode, token: object) -> None:
        self.unlock_one(node)

    def locked_by(self, node: UnifiedTreeNode, token: object) -> Iterable[UnifiedTreeNode]:
        return (node,)

    def is_candidate(self, node: UnifiedTreeNode) -> bool:
        data = node.component_data[_REC]
        return data.value is not None and data.lock_ref == 0

    def gives_hit(self, node: UnifiedTreeNode) -> bool:
        return node.component_data[_REC].value is not None

    # -- life of a request ---------------------------------------------------------------------

    def slots(self, state: RequestState) -> RequestSlots:
        """The request's slots and what they hold."""
        return state.component[_REC]

    def state_slots(self, state: RequestState, start: int, stop: int) -> StateSlots:
        slots = self.slots(state)
        return StateSlots(slots.running, slots.target(start, stop), slots.clone_src)

    def started(self, state: RequestState) -> None:
        self.slots(state).clone_src = None

    def needs_lock(self, state: RequestState) -> bool:
        """Until the copy of the snapshot is dispatched."""
        return self.slots(state).clone_src is not None

    def demand(self, num_tokens: int, live: Sequence[RequestState]) -> int:
        return self.plan.request_owned_slots

    def demand_alone(self, num_tokens: int) -> int:
        """What it owns, and the snapshot that it is cloned from."""
        return self.plan.request_owned_slots + 1

    def admit_demand(self) -> int:
        return self.plan.request_owned_slots

    def check_match(self, match: MatchResult) -> None:
        value = self.data(match.best_match_node).value
        source = None if value is None else int(value[0])
        if match.hit_len and source != match.recurrent_cow_src:
            raise StaleNodeError(
                f"the snapshot of {match.best_match_node} was slot {match.recurrent_cow_src} when "
                f"it matched and is {source} now; match again"
            )

    def admit(self, state: RequestState, match: MatchResult) -> bool:
        taken = self.pool.alloc(state.row, self.plan.request_owned_slots, state.dp_rank)
        if taken is None:
            return False
        running, *tracks = taken
        if not tracks and match.recurrent_branching_seqlen is not None:
            # The base path owns no track slot, but keeps the branching state if one is to spare.
            tracks = self.pool.alloc(state.row, 1, state.dp_rank) or []
        interval = self.plan.interval if self.plan.num_tracks else None
        state.component[_REC] = RequestSlots(
            running,
            [TrackSlot(slot) for slot in tracks],
            interval,
            clone_src=match.recurrent_cow_src,
            branching_seqlen=match.recurrent_branching_seqlen,
        )
        return True

    def cuts(self, state: RequestState, start: int, stop: int) -> Sequence[int]:
        return [cut for cut in self.slots(state).boundaries(start, stop) if cut < stop]

    def extend_demand(self, state: RequestState, num_tokens: int) -> int:
        return 0

    def extend(self, state: RequestState, num_tokens: int) -> bool:
        return True

    def undo_extend(self, state: RequestState, num_tokens: int) -> None:
        pass

    def advanced(self, state: RequestState, start: int) -> None:
        self.slots(state).dispatched(start, state.computed_len)

    def publish_demand(self, state: RequestState, *, finished: bool) -> int:
        """A running request gives a track slot away only against a replacement."""
        slots = self.slots(state)
        wants = self.plan.num_tracks and not finished and slots.spare is None
        return int(bool(wants) and self._kept_beyond(state, state.computed_len) is not None)

    def prepare_publish(self, state: RequestState, seqlen: int, *, finished: bool) -> int:
        """Up to the state that can be donated; what lies beyond could give no hit."""
        slots = self.slots(state)
        if finished and not self.plan.num_tracks and seqlen == state.computed_len:
            return seqlen
        kept = self._kept_beyond(state, seqlen)
        if kept is None:
            return state.protected_len
        if self.plan.num_tracks and not finished and slots.spare is None:
            spare = self.pool.alloc(state.row, 1, state.dp_rank)
            if spare is None:
                return state.protected_len
            slots.spare = spare[0]
        return kept

    def _kept_beyond(self, state: RequestState, upto: int) -> int | None:
        """Where the latest kept state within ``upto`` lies, if beyond what is published."""
        track = self.slots(state).latest(upto)
        return track.seqlen if track is not None and track.seqlen > state.protected_len else None

    def offer(self, state: RequestState, seqlen: int) -> Mapping[str, Any]:
        slot = self.slots(state).holder(seqlen)
        self.allocator.unclaim(np.array([slot], np.int32), state.dp_rank)
        return {"recurrent_value": slot, "recurrent_seqlen": seqlen}

    def settle(self, state: RequestState, result: InsertResult) -> None:
        """The donated slot is the tree's now, unless the tree had a snapshot there."""
        slots = self.slots(state)
        slot = slots.holder(result.inserted_len)
        if not result.recurrent_exist:
            self.pool.hand_over(state.row, slot)
            slots.replace(slot)
            return
        self.allocator.claim(np.array([slot], np.int32), state.dp_rank)
        if slots.spare is not None:
            self.pool.free_one(state.row, slots.spare, state.dp_rank)
            slots.spare = None

    def end(self, state: RequestState) -> None:
        self.pool.free(state.row, state.dp_rank)

    def held_by(self, state: RequestState) -> IndexArray:
        return self.pool.indices(state.row)

    # -- host tier -----------------------------------------------------------------------------

    def host_need(self, hit_len: int, full_len: int, stop: int) -> HostNeed:
        """The snapshot at ``stop``, wherever that is: a device that had it would have hit it."""
        return HostNeed(_REC, stop, stop, 1)

    def host_fields(self, need: HostNeed, indices: IndexArray) -> Mapping[str, Any]:
        return {"recurrent_value": int(indices[0]), "recurrent_seqlen": need.stop}
