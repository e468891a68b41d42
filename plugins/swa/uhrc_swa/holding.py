"""SWAHolding: what a live request has of its window.

How far a request is decides what it needs: once ``computed_len`` tokens are computed, it has no SWA
data of its own before ``swa_evicted_seqlen(computed_len)``, nor before ``protected_len``, where the
data is the tree's.
"""

from __future__ import annotations

from collections.abc import Iterator

from uhrc_core.plugin_api import (
    ComponentType,
    IndexArray,
    InsertResult,
    InvalidParamsError,
    MakeRoom,
    Offer,
    RequestState,
    SWATokenToKVPoolAllocator,
    TokenHolding,
)
from uhrc_swa.window import WindowPlan


class SWAHolding(TokenHolding):
    """The SWA pages of a request; -1 in its page table for those that have left the window."""

    kind = ComponentType.SWA

    def __init__(
        self, state: RequestState, allocator: SWATokenToKVPoolAllocator, plan: WindowPlan
    ) -> None:
        super().__init__(state, allocator)
        self.swa_allocator = allocator
        self.plan = plan
        kept, hit = min(self._evicted_seqlen, state.protected_len), state.protected_len
        self.pages(0, kept)[:] = -1
        self.pages(kept, hit)[:] = self._pages_of(state.indices(kept, hit))

    @property
    def _evicted_seqlen(self) -> int:
        return self.plan.swa_evicted_seqlen(self.state.computed_len)

    @property
    def _own_start(self) -> int:
        """Depth from which on the SWA data of its tokens is its own."""
        return max(self._evicted_seqlen, self.state.protected_len)

    def _pages_of(self, full_indices: IndexArray) -> IndexArray:
        """The SWA pages that FULL indices, whole pages in order, are mapped to."""
        pages = self.allocator.page_numbers(full_indices)
        return self.swa_allocator.page_of(pages, self.state.dp_rank)

    # -- a step --------------------------------------------------------------------------------

    def check_extend(self, num_tokens: int) -> None:
        most = self.plan.extend_tokens
        if num_tokens > most:
            raise InvalidParamsError(
                f"num_tokens: {num_tokens} at once, and window pools are sized for {most}; extend "
                "in steps, or raise components.swa.extend_tokens"
            )

    def extend(self, num_tokens: int) -> bool:
        first, stop = self.new_pages(num_tokens)
        if first < stop:
            state, begin = self.state, first * self.page_size
            full = state.indices(begin, state.allocated_len + num_tokens)
            full_pages = self.allocator.page_numbers(full)
            fresh = self.swa_allocator.take_pages_for(full_pages, state.dp_rank)
            if fresh is None:
                return False
            self.pages(begin, stop * self.page_size)[:] = fresh
        return True

    def undo_extend(self, num_tokens: int) -> None:
        first, stop = self.new_pages(num_tokens)
        self._give_up(first * self.page_size, stop * self.page_size)

    def advanced(self, start: int) -> None:
        """Free what the window has moved past."""
        had, gone = self.plan.swa_evicted_seqlen(start), self._evicted_seqlen
        if had < gone:
            self._give_up(max(had, self.state.protected_len), gone)
            self.pages(had, gone)[:] = -1

    def needs_lock(self) -> bool:
        """Until the window has moved past the prefix."""
        return self._evicted_seqlen < self.state.protected_len

    # -- publishing and the end ----------------------------------------------------------------

    def offer(self, seqlen: int, make_room: MakeRoom | None) -> Offer:
        return Offer(seqlen, {"swa_evicted_seqlen": self._evicted_seqlen})

    def published(self, result: InsertResult) -> None:
        """What a tombstone took is mapped from the tree's indices now, and so is what was there;
        what is still mapped from the request's is double and goes."""
        start, stop = self._own_start, result.prefix_len
        if stop <= start:
            return
        double = self._pages_of(self.state.indices(start, stop))
        self.allocator.give_up_pages(double[double >= 0], self.state.dp_rank)
        for node in result.node.path_to_root():
            if node.end <= start:
                break
            full = node.component_data[ComponentType.FULL].value
            assert full is not None
            begin = max(node.start, start)
            self.pages(begin, node.end)[:] = self._pages_of(full[begin - node.start :])

    def end(self) -> None:
        self._give_up(self._own_start, self.state.allocated_len)

    @property
    def num_owned(self) -> int:
        """Tokens, in whole pages, that it has taken from the pool."""
        return self.allocator.page_ceil(max(self.state.allocated_len - self._own_start, 0))

    def owned(self) -> IndexArray:
        start, stop = self._own_start, max(self.state.allocated_len, self._own_start)
        return self.allocator.indices_of(self.pages(start, stop).copy())[: stop - start]

    def _give_up(self, start: int, stop: int) -> None:
        if start < stop:
            self.allocator.give_up_pages(self.pages(start, stop), self.state.dp_rank)

    def problems(self) -> Iterator[str]:
        """Where its page table is not what its FULL indices are mapped to."""
        start, stop = self._evicted_seqlen, self.state.allocated_len
        if start < stop:
            mapped, pages = self._pages_of(self.state.indices(start, stop)), self.pages(start, stop)
            # Before its own, others may have given a tombstone data that it has no use for.
            if ((pages != mapped) & (pages >= 0)).any() or (
                self.pages(self._own_start, stop) < 0
            ).any():
                yield (
                    f"request {self.state.request.rid!r}: its window is on pages "
                    f"{self.pages(start, stop)}, its FULL indices are mapped to {mapped}"
                )
