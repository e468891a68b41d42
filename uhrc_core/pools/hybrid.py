"""HybridReqToTokenPool: recurrent slots, and which of them each running request owns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from uhrc_core.indices import IndexArray
from uhrc_core.pools.allocator import PagedIndexAllocator


class HybridReqToTokenPool:
    """A free list of slots per dp rank, and per request row the slots it owns.

    One slot is the whole recurrent state of one sequence position. The rows are those of
    `ReqToTokenPool`; a slot given to the tree leaves its row.
    """

    def __init__(self, num_slots: int, dp_size: int) -> None:
        self.allocator = PagedIndexAllocator(num_slots, 1, dp_size)
        self._slots: dict[int, list[int]] = {}

    def slots(self, row: int) -> Sequence[int]:
        """The slots of a request, in the order it got them."""
        return tuple(self._slots.get(row, ()))

    def alloc(self, row: int, num_slots: int, dp_rank: int) -> Sequence[int] | None:
        """Give a request more slots; ``None`` when too few are free (nothing changed)."""
        fresh = self.allocator.take_pages(num_slots, dp_rank)
        if fresh is None:
            return None
        self._slots.setdefault(row, []).extend(fresh.tolist())
        return fresh.tolist()

    def hand_over(self, row: int, slot: int) -> None:
        """The slot has another owner now."""
        self._slots[row].remove(slot)

    def free_one(self, row: int, slot: int, dp_rank: int) -> None:
        """Free one of the request's slots."""
        self.hand_over(row, slot)
        self.allocator.give_up_pages(np.array([slot], np.int32), dp_rank)

    def free(self, row: int, dp_rank: int) -> None:
        """Free every slot the request still owns and forget its row."""
        self.allocator.give_up_pages(self.indices(row), dp_rank)
        self._slots.pop(row, None)

    def indices(self, row: int) -> IndexArray:
        """int32[n], a copy of `slots`."""
        return np.array(self._slots.get(row, []), np.int32)
