"""SWATokenToKVPoolAllocator: SWA indices, and the map from FULL indices to them.

A request's row and the tree's nodes name tokens by FULL index. The pool of the window layers is
smaller and has indices of its own, so each page of the FULL pool is mapped to the page of this pool
that holds the same tokens, or to none once they have left the window.
"""

from __future__ import annotations

import numpy as np

from uhrc_core.errors import InvalidIndexError
from uhrc_core.indices import IndexArray, index_array
from uhrc_core.pools.allocator import PagedIndexAllocator


class SWATokenToKVPoolAllocator(PagedIndexAllocator):
    """A page that is freed is mapped no more, so no mapping can outlive its data.

    Args:
        num_indices: capacity per rank; a positive multiple of the FULL pool's page size.
        full: the FULL pool, whose pages and ranks this one has, too.
        window_tokens: how many tokens a token attends to, itself included.

    Whoever frees FULL indices first frees what they are mapped to (`free_for`).
    """

    def __init__(self, num_indices: int, full: PagedIndexAllocator, window_tokens: int) -> None:
        super().__init__(num_indices, full.page_size, full.dp_size)
        self.window_tokens = window_tokens
        self.full = full
        self._here: IndexArray = np.full((self.dp_size, full.ledger.num_pages), -1, np.int32)
        self._full: IndexArray = np.full((self.dp_size, self.ledger.num_pages), -1, np.int32)

    def translate(self, full_indices: IndexArray, dp_rank: int = 0) -> IndexArray:
        """int32[n]: the index here of each FULL index, -1 where there is none.

        Raises:
            InvalidIndexError: an index is outside the FULL pool.
            InvalidParamsError: an unknown rank.
        """
        self.ledger.check_rank(dp_rank)
        full_indices = index_array(full_indices)
        if not len(full_indices):
            return np.empty(0, np.int32)
        here: IndexArray = self._here[dp_rank]
        if int(full_indices.max()) >= len(here) * self.page_size:
            raise InvalidIndexError(
                f"indices: outside the FULL pool's [0, {len(here) * self.page_size})"
            )
        if self.page_size == 1:
            return here[full_indices]
        pages: IndexArray = here[full_indices // self.page_size]
        return np.where(pages < 0, pages, pages * self.page_size + full_indices % self.page_size)

    def alloc_for(self, full_indices: IndexArray, dp_rank: int = 0) -> IndexArray | None:
        """int32[n] in fresh pages, mapped from FULL indices that fill pages (the last in part).

        ``None`` when the rank is short.

        Raises:
            InvalidIndexError: the caller does not hold one of them, or one is mapped already.
            InvalidParamsError: an unknown rank.
        """
        if (self.translate(full_indices, dp_rank) >= 0).any():
            raise InvalidIndexError("indices: some have an SWA index already; free it (free_for)")
        full_indices = index_array(full_indices)
        full_pages = self.pages(full_indices)
        self.full.ledger.check_held(full_pages, dp_rank)
        fresh = self.alloc(len(full_indices), dp_rank)
        if fresh is not None:
            self._map(full_pages, self.pages(fresh), dp_rank)
        return fresh

    def take_pages_for(self, full_pages: IndexArray, dp_rank: int) -> IndexArray | None:
        """int32[n] fresh pages, a live request's, mapped from FULL pages it has just been given.

        If somebody has freed those without what they were mapped to, that mapping is forgotten.
        """
        fresh = self.take_pages(len(full_pages), dp_rank)
        if fresh is not None:
            self._map(full_pages, fresh, dp_rank)
        return fresh

    def page_of(self, full_pages: IndexArray, dp_rank: int) -> IndexArray:
        """int32[n]: the page here of each FULL page, -1 where there is none."""
        return self._here[dp_rank][full_pages]

    def free_for(self, full_indices: IndexArray, dp_rank: int = 0) -> None:
        """Free what FULL indices (whole pages, the last in part) are mapped to, where they are."""
        mapped = self.translate(full_indices, dp_rank)
        self.free(mapped[mapped >= 0], dp_rank)

    def move(self, source: IndexArray, target: IndexArray, dp_rank: int) -> None:
        """What the FULL indices ``source`` are mapped to, ``target`` (unmapped) is instead."""
        source_pages, target_pages = self.page_numbers(source), self.page_numbers(target)
        moved = self._here[dp_rank][source_pages]
        assert (self._here[dp_rank][target_pages] < 0).all() and (moved >= 0).all()
        self._here[dp_rank][source_pages] = -1
        self._map(target_pages, moved, dp_rank)

    def free(self, indices: IndexArray, dp_rank: int = 0) -> None:
        indices = index_array(indices)
        super().free(indices, dp_rank)
        self._unmap(self.page_numbers(indices), dp_rank)

    def give_up_pages(self, pages: IndexArray, dp_rank: int) -> None:
        super().give_up_pages(pages, dp_rank)
        self._unmap(pages, dp_rank)

    def reclaim(self, indices: IndexArray, dp_rank: int) -> None:
        super().reclaim(indices, dp_rank)
        self._unmap(self.page_numbers(indices), dp_rank)

    def reset(self) -> None:
        super().reset()
        self._here.fill(-1)
        self._full.fill(-1)

    def mapped_pages(self, dp_rank: int) -> tuple[IndexArray, IndexArray]:
        """FULL pages that are mapped, ascending, and the page each is mapped to; for the audit."""
        full = np.flatnonzero(self._here[dp_rank] >= 0).astype(np.int32)
        return full, self._here[dp_rank][full]

    def _map(self, full_pages: IndexArray, pages: IndexArray, dp_rank: int) -> None:
        self._here[dp_rank][full_pages] = pages
        self._full[dp_rank][pages] = full_pages

    def _unmap(self, pages: IndexArray, dp_rank: int) -> None:
        full_pages = self._full[dp_rank][pages]
        led_here = (full_pages >= 0) & (self._here[dp_rank][full_pages] == pages)
        self._here[dp_rank][full_pages[led_here]] = -1
        self._full[dp_rank][pages] = -1
