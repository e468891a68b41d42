"""RecurrentHolding: the slots of a live request, and when one of them becomes a snapshot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from uhrc_core.plugin_api import (
    ComponentType,
    Holding,
    HybridReqToTokenPool,
    IndexArray,
    InsertResult,
    MakeRoom,
    Offer,
    RequestState,
    StateSlots,
)
from uhrc_recurrent.track import RequestSlots


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


class RecurrentHolding(Holding):
    """A running slot and track slots; see `uhrc_recurrent.track`."""

    kind = ComponentType.RECURRENT

    def __init__(
        self, state: RequestState, pool: HybridReqToTokenPool, plan: TrackPlan, slots: RequestSlots
    ) -> None:
        super().__init__(state)
        self.pool = pool
        self.plan = plan
        self.slots = slots

    # -- a step --------------------------------------------------------------------------------

    def cuts(self, start: int, stop: int) -> Sequence[int]:
        return [cut for cut in self.slots.boundaries(start, stop) if cut < stop]

    def state_slots(self, start: int, stop: int) -> StateSlots:
        slots = self.slots
        return StateSlots(slots.running, slots.target(start, stop), slots.clone_src)

    def started(self) -> None:
        self.slots.clone_src = None

    def needs_lock(self) -> bool:
        """Until the copy of the snapshot is dispatched."""
        return self.slots.clone_src is not None

    def extend_demand(self, num_tokens: int) -> int:
        return 0

    def extend(self, num_tokens: int) -> bool:
        return True

    def undo_extend(self, num_tokens: int) -> None:
        pass

    def advanced(self, start: int) -> None:
        self.slots.dispatched(start, self.state.computed_len)

    # -- publishing and the end ----------------------------------------------------------------

    def publishable_len(self, num_tokens: int) -> int:
        """Up to the last state that is kept, which is where a forward must end."""
        return max(self.slots.boundaries(0, num_tokens), default=0)

    def offer(self, seqlen: int, make_room: MakeRoom | None) -> Offer | None:
        """The latest kept state, with the tokens before it; what lies beyond could give no hit.

        A running request gives a track slot away only against a replacement.
        """
        state, slots = self.state, self.slots
        if make_room is None and not self.plan.num_tracks and seqlen == state.computed_len:
            return self._of(seqlen)
        kept = slots.latest(seqlen)
        if kept is None or kept.seqlen <= state.protected_len:
            return None
        if self.plan.num_tracks and make_room is not None and slots.spare is None:
            spare = make_room(1) and self.pool.alloc(state.row, 1, state.dp_rank)
            if not spare:
                return None
            slots.spare = spare[0]
        return self._of(kept.seqlen)

    def _of(self, seqlen: int) -> Offer:
        slot = self.slots.holder(seqlen)
        return Offer(seqlen, {"recurrent_value": slot, "recurrent_seqlen": seqlen})

    def published(self, result: InsertResult) -> None:
        """The donated slot is the tree's now, unless the tree had a snapshot there."""
        state, slots = self.state, self.slots
        if not result.recurrent_exist:
            slot = slots.holder(result.inserted_len)
            self.pool.hand_over(state.row, slot)
            slots.replace(slot)
        elif slots.spare is not None:
            self.pool.free_one(state.row, slots.spare, state.dp_rank)
            slots.spare = None

    def end(self) -> None:
        self.pool.free(self.state.row, self.state.dp_rank)

    def owned(self) -> IndexArray:
        return self.pool.indices(self.state.row)

    def digest(self) -> tuple[int, ...]:
        return self.slots.digest()
