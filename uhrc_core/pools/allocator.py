"""Allocators of pool indices: free lists per dp rank, in whole pages, counted by the ledger.

An index is a token's place in the device pool: page ``index // page_size``, offset
``index % page_size``. Each dp rank has an index space of its own, ``[0, num_tokens)``.
"""

from __future__ import annotations

import numpy as np

from uhrc_core.arguments import count
from uhrc_core.errors import InvalidIndexError, InvalidParamsError
from uhrc_core.indices import IndexArray, index_array, page_ceil
from uhrc_core.pools.ledger import Ledger, Owner

_REQUEST = Owner.REQUEST  # an enum's members are slow to look up


class PagedIndexAllocator:
    """A free list of pages per dp rank; what it hands out are indices, ``page_size`` to a page.

    Args:
        num_indices: capacity per rank; a positive multiple of ``page_size``.
        page_size: indices per page.
        dp_size: number of ranks.

    The last page freed is the first handed out, so every process that makes the same calls gets the
    same indices. Nothing here raises because a pool is full: `alloc` and `extend` answer ``None``.
    """

    def __init__(self, num_indices: int, page_size: int, dp_size: int) -> None:
        if page_size < 1 or dp_size < 1 or num_indices < page_size or num_indices % page_size:
            raise InvalidParamsError(
                f"pool: num_indices {num_indices} must be a positive multiple of page_size "
                f"{page_size}, on dp_size {dp_size} >= 1 rank(s)"
            )
        self.capacity = num_indices
        self.page_size = page_size
        self.dp_size = dp_size
        self.ledger = Ledger(num_indices // page_size, dp_size)
        self._offsets = np.arange(page_size, dtype=np.int32)
        self._stacks = self._full_stacks()

    # -- sizes, in indices ---------------------------------------------------------------------

    def available_size(self, dp_rank: int) -> int:
        """Free indices on ``dp_rank``."""
        return self.ledger.counts[dp_rank].free * self.page_size

    def evictable_size(self, dp_rank: int) -> int:
        """Indices the tree holds and would give up."""
        return self.ledger.counts[dp_rank].evictable * self.page_size

    def protected_size(self, dp_rank: int) -> int:
        """Indices the tree holds under lock."""
        return self.ledger.counts[dp_rank].protected * self.page_size

    def active_size(self, dp_rank: int) -> int:
        """Indices callers hold, whole pages."""
        return self.ledger.counts[dp_rank].active * self.page_size

    def page_ceil(self, num_indices: int) -> int:
        """``num_indices`` rounded up to whole pages."""
        return page_ceil(num_indices, self.page_size)

    # -- callers -------------------------------------------------------------------------------

    def alloc(self, num_indices: int, dp_rank: int = 0) -> IndexArray | None:
        """int32[num_indices] in fresh pages, or ``None`` when the rank is short.

        The last page may be used in part; it is the caller's as a whole.
        """
        return self.extend(0, -1, num_indices, dp_rank)

    def extend(
        self, length: int, last_index: int, num_indices: int, dp_rank: int = 0
    ) -> IndexArray | None:
        """int32[num_indices] that continue a sequence of ``length`` indices after ``last_index``.

        Fills the sequence's last page before it takes new ones. ``None`` when the rank is short.
        """
        self.ledger.check_rank(dp_rank)
        num_indices, length = count("num_indices", num_indices), count("length", length)
        if length and (last_index - length + 1) % self.page_size:
            raise InvalidIndexError(
                f"last_index: {last_index} cannot be the end of {length} indices in whole pages"
            )
        room = min(-length % self.page_size, num_indices)
        num_pages = -(-(num_indices - room) // self.page_size)
        if num_pages > self.ledger.counts[dp_rank].free:
            return None
        out = np.empty(num_indices, np.int32)
        out[:room] = last_index + 1 + self._offsets[:room]
        fresh = self.indices_of(self._pop(num_pages, dp_rank, Owner.CALLER))
        out[room:] = fresh[: num_indices - room]
        return out

    def free(self, indices: IndexArray, dp_rank: int = 0) -> None:
        """Give back indices that `alloc` or `extend` handed out, whole pages (the last in part)."""
        self.ledger.check_rank(dp_rank)
        pages = self.pages(index_array(indices))
        self.ledger.give_back(pages, dp_rank)
        self._push(pages, dp_rank)

    # -- live requests, in pages ---------------------------------------------------------------

    def take_pages(self, num_pages: int, dp_rank: int) -> IndexArray | None:
        """int32[num_pages] fresh pages, a live request's; ``None`` when the rank is short.

        Callers can neither free nor insert them.
        """
        if num_pages > self.ledger.counts[dp_rank].free:
            return None
        return self._pop(num_pages, dp_rank, _REQUEST)

    def give_up_pages(self, pages: IndexArray, dp_rank: int) -> None:
        """A live request's pages become free."""
        self.ledger.give_back(pages, dp_rank, _REQUEST)
        self._push(pages, dp_rank)

    # -- the tree ------------------------------------------------------------------------------

    def adopt(
        self, indices: IndexArray, dp_rank: int, giver: Owner = Owner.CALLER, *, protected: bool
    ) -> None:
        """Indices of the giver, whole pages in order, become the tree's."""
        self.ledger.adopt(self.page_numbers(indices), dp_rank, giver, protected=protected)

    def reclaim(self, indices: IndexArray, dp_rank: int) -> None:
        """The tree's evicted indices, whole pages in order, become free."""
        pages = self.page_numbers(indices)
        self.ledger.reclaim(pages, dp_rank)
        self._push(pages, dp_rank)

    def protect(self, num_indices: int, dp_rank: int) -> None:
        self.ledger.protect(num_indices // self.page_size, dp_rank)

    def unprotect(self, num_indices: int, dp_rank: int) -> None:
        self.ledger.unprotect(num_indices // self.page_size, dp_rank)

    def page_numbers(self, indices: IndexArray) -> IndexArray:
        """int32[n_pages] of indices that are known to fill pages in order."""
        return indices if self.page_size == 1 else indices[:: self.page_size] // self.page_size

    def pages(self, indices: IndexArray) -> IndexArray:
        """int32[n_pages] of a caller's indices, which fill pages in order (the last in part).

        Raises:
            InvalidIndexError: the indices do not start at a page or jump inside one.
        """
        heads = indices[:: self.page_size]
        if self.page_size == 1:
            return heads
        full = (heads[:, None] + self._offsets).reshape(-1)[: len(indices)]
        if (heads % self.page_size).any() or not np.array_equal(full, indices):
            at = int((full != indices).argmax()) if not (heads % self.page_size).any() else 0
            raise InvalidIndexError(
                f"indices: element {at} ({indices[at]}) is not where pages of {self.page_size} "
                "consecutive indices would put it; pass whole pages in order"
            )
        return heads // self.page_size

    def free_pages(self, dp_rank: int) -> IndexArray:
        """int32[n_free], the free list with the next page last, a view; for audit and digest."""
        return self._stacks[dp_rank][: self.ledger.counts[dp_rank].free]

    def reset(self) -> None:
        """Free everything, whoever owns it."""
        self.ledger = Ledger(self.ledger.num_pages, self.dp_size)
        self._stacks = self._full_stacks()

    def _full_stacks(self) -> tuple[IndexArray, ...]:
        # A rank's stack is as high as its count of free pages, so no height is kept beside it.
        one = np.arange(self.ledger.num_pages - 1, -1, -1, dtype=np.int32)
        return tuple(one.copy() for _ in range(self.dp_size))

    def _pop(self, num_pages: int, dp_rank: int, owner: Owner) -> IndexArray:
        height = self.ledger.counts[dp_rank].free
        pages = self._stacks[dp_rank][height - num_pages : height][::-1].copy()
        self.ledger.take(pages, dp_rank, owner)
        return pages

    def _push(self, pages: IndexArray, dp_rank: int) -> None:
        height = self.ledger.counts[dp_rank].free
        self._stacks[dp_rank][height - len(pages) : height] = pages[::-1]

    def indices_of(self, pages: IndexArray) -> IndexArray:
        """int32[n_pages * page_size]: all indices of pages, in order."""
        if self.page_size == 1:
            return pages
        return (pages[:, None] * self.page_size + self._offsets).reshape(-1)


class PagedTokenToKVPoolAllocator(PagedIndexAllocator):
    """KV token indices in pages (``page_size > 1``)."""


class TokenToKVPoolAllocator(PagedIndexAllocator):
    """KV token indices one by one (``page_size == 1``)."""

    def __init__(self, num_tokens: int, dp_size: int = 1) -> None:
        super().__init__(num_tokens, 1, dp_size)
