"""Ledger: the one place that counts who owns every page of a component's pool.

A page is *free*, *active* (a live request's, or in the hands of a caller), or the *tree's*; the
tree's pages are *protected* while a lock holds their node, else *evictable*. On every dp rank

    active + tree_evictable + tree_protected + free == capacity.

Every change of hands is a method here. It is checked against a map of owners before anything
changes, so a page freed twice, inserted twice or never allocated raises and leaves no trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from uhrc_core.arguments import count
from uhrc_core.errors import InvalidIndexError, InvalidParamsError
from uhrc_core.indices import IndexArray

_FREE: Final = 0
_HELD: Final = 1
_REQUEST: Final = 2
_TREE: Final = 3
_OWNER_NAMES: Final = ("free", "held by the caller", "a live request's", "owned by the tree")


@dataclass(slots=True)
class RankCounts:
    """Pages by owner on one dp rank."""

    free: int
    active: int = 0
    evictable: int = 0
    protected: int = 0


class Ledger:
    """Owners and counts of ``num_pages`` pages on each of ``dp_size`` ranks.

    Page arguments are int32[n] page numbers of one rank. All methods raise `InvalidIndexError`
    naming the first page that has another owner, is out of range, or is named twice.
    """

    def __init__(self, num_pages: int, dp_size: int) -> None:
        self.num_pages = num_pages
        self.dp_size = dp_size
        self.counts = tuple(RankCounts(free=num_pages) for _ in range(dp_size))
        self._owner = np.zeros((dp_size, num_pages), np.uint8)
        self._stamp = np.zeros(num_pages, np.int32)

    def take(self, pages: IndexArray, dp_rank: int) -> None:
        """free → a caller's."""
        self._move(pages, dp_rank, _FREE, _HELD)
        counts = self.counts[dp_rank]
        counts.free -= len(pages)
        counts.active += len(pages)

    def give_back(self, pages: IndexArray, dp_rank: int) -> None:
        """a caller's → free."""
        self._move(pages, dp_rank, _HELD, _FREE)
        counts = self.counts[dp_rank]
        counts.active -= len(pages)
        counts.free += len(pages)

    def adopt(self, pages: IndexArray, dp_rank: int, *, protected: bool) -> None:
        """a caller's → tree."""
        self._move(pages, dp_rank, _HELD, _TREE)
        counts = self.counts[dp_rank]
        counts.active -= len(pages)
        if protected:
            counts.protected += len(pages)
        else:
            counts.evictable += len(pages)

    def reclaim(self, pages: IndexArray, dp_rank: int) -> None:
        """tree (evictable) → free."""
        self._move(pages, dp_rank, _TREE, _FREE)
        counts = self.counts[dp_rank]
        counts.evictable -= len(pages)
        counts.free += len(pages)

    def protect(self, num_pages: int, dp_rank: int) -> None:
        """tree: evictable → protected, when a node gets its first lock."""
        counts = self.counts[dp_rank]
        counts.evictable -= num_pages
        counts.protected += num_pages
        assert counts.evictable >= 0, counts

    def unprotect(self, num_pages: int, dp_rank: int) -> None:
        """tree: protected → evictable, when a node loses its last lock."""
        counts = self.counts[dp_rank]
        counts.protected -= num_pages
        counts.evictable += num_pages
        assert counts.protected >= 0, counts

    def claim(self, pages: IndexArray, dp_rank: int) -> None:
        """a caller's → a live request's: nobody else can free or insert them."""
        self._move(pages, dp_rank, _HELD, _REQUEST)

    def unclaim(self, pages: IndexArray, dp_rank: int) -> None:
        """a live request's → the caller's, to be inserted or freed."""
        self._move(pages, dp_rank, _REQUEST, _HELD)

    def check_held(self, pages: IndexArray, dp_rank: int) -> None:
        """Raise unless every page is a caller's and named once; changes nothing."""
        self._expect(pages, dp_rank, _HELD)

    def pages_of_tree(self, dp_rank: int) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self._owner[dp_rank] == _TREE)

    def check_rank(self, dp_rank: int) -> None:
        """Raise `InvalidParamsError` for a rank these pools do not have."""
        if count("dp_rank", dp_rank) >= self.dp_size:
            raise InvalidParamsError(
                f"dp_rank: {dp_rank} is not one of this cache's {self.dp_size} rank(s)"
            )

    def _move(self, pages: IndexArray, dp_rank: int, old: int, new: int) -> None:
        self._expect(pages, dp_rank, old)
        self._owner[dp_rank][pages] = new

    def _expect(self, pages: IndexArray, dp_rank: int, owner: int) -> None:
        if not len(pages):
            return
        if int(pages.min()) < 0 or int(pages.max()) >= self.num_pages:
            bad = pages[(pages < 0) | (pages >= self.num_pages)][0]
            raise InvalidIndexError(
                f"page {bad} is outside [0, {self.num_pages}) on dp_rank {dp_rank}"
            )
        owners = self._owner[dp_rank][pages]
        if (owners != owner).any():
            at = int((owners != owner).argmax())
            raise InvalidIndexError(
                f"page {pages[at]} on dp_rank {dp_rank} is {_OWNER_NAMES[owners[at]]}, "
                f"but the call needs pages {_OWNER_NAMES[owner]}"
            )
        order = np.arange(len(pages), dtype=np.int32)
        self._stamp[pages] = order
        if (self._stamp[pages] != order).any():
            at = int((self._stamp[pages] != order).argmax())
            raise InvalidIndexError(f"page {pages[at]} on dp_rank {dp_rank} is named twice")
