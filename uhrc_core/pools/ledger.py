"""Ledger: the one place that counts who owns every page of a component's pool.

A page is *free*, *active* (a caller's, or a live request's), or the *tree's*; the tree's pages are
*protected* while a lock holds their node, else *evictable*. On every dp rank

    active + tree_evictable + tree_protected + free == capacity.

Every change of hands is a method here. It is checked against a map of owners before anything
changes, so a page freed twice, inserted twice or never allocated raises and leaves no trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from uhrc_core.arguments import count
from uhrc_core.errors import InvalidIndexError, InvalidParamsError
from uhrc_core.indices import IndexArray


class Owner(IntEnum):
    """Whose a page is.

    What is a live request's, no caller can free or insert, whatever indices it mixes up.
    """

    FREE = 0
    CALLER = 1
    REQUEST = 2
    TREE = 3


# An enum's members are slow to look up, and each change of hands needs some.
_FREE, _CALLER, _TREE = Owner.FREE, Owner.CALLER, Owner.TREE
_OWNER_NAMES = ("free", "held by the caller", "a live request's", "owned by the tree")


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
    naming the first page that has another owner, is out of range, or is named twice; each costs
    O(pages named).
    """

    def __init__(self, num_pages: int, dp_size: int) -> None:
        self.num_pages = num_pages
        self.dp_size = dp_size
        self.counts = tuple(RankCounts(free=num_pages) for _ in range(dp_size))
        self._owner = tuple(np.zeros(num_pages, np.uint8) for _ in range(dp_size))
        self._stamp = np.zeros(num_pages, np.int32)

    def take(self, pages: IndexArray, dp_rank: int, owner: Owner = Owner.CALLER) -> None:
        """free → a caller's or a live request's."""
        self._move(pages, dp_rank, _FREE, owner)
        counts = self.counts[dp_rank]
        counts.free -= len(pages)
        counts.active += len(pages)

    def give_back(self, pages: IndexArray, dp_rank: int, owner: Owner = Owner.CALLER) -> None:
        """a caller's or a live request's → free."""
        self._move(pages, dp_rank, owner, _FREE)
        counts = self.counts[dp_rank]
        counts.active -= len(pages)
        counts.free += len(pages)

    def adopt(self, pages: IndexArray, dp_rank: int, giver: Owner, *, protected: bool) -> None:
        """a caller's or a live request's → tree."""
        self._move(pages, dp_rank, giver, _TREE)
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

    def check_held(self, pages: IndexArray, dp_rank: int) -> None:
        """Raise unless every page is a caller's and named once; changes nothing."""
        self._expect(pages, dp_rank, _CALLER)

    def pages_of_tree(self, dp_rank: int) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self._owner[dp_rank] == _TREE)

    def check_rank(self, dp_rank: int) -> None:
        """Raise `InvalidParamsError` for a rank these pools do not have."""
        if count("dp_rank", dp_rank) >= self.dp_size:
            raise InvalidParamsError(
                f"dp_rank: {dp_rank} is not one of this cache's {self.dp_size} rank(s)"
            )

    def _move(self, pages: IndexArray, dp_rank: int, old: Owner, new: Owner) -> None:
        self._expect(pages, dp_rank, old)
        self._owner[dp_rank][pages] = new

    def _expect(self, pages: IndexArray, dp_rank: int, owner: Owner) -> None:
        if not len(pages):
            return
        try:
            # As unsigned numbers, so that a negative page is out of range, too.
            owners = self._owner[dp_rank].take(pages.view(np.uint32)).tobytes()
        except IndexError:
            bad = pages[(pages < 0) | (pages >= self.num_pages)][0]
            raise InvalidIndexError(
                f"page {bad} is outside [0, {self.num_pages}) on dp_rank {dp_rank}"
            ) from None
        if owners.count(owner) != len(owners):
            at = next(at for at, found in enumerate(owners) if found != owner)
            raise InvalidIndexError(
                f"page {pages[at]} on dp_rank {dp_rank} is {_OWNER_NAMES[owners[at]]}, "
                f"but the call needs pages {_OWNER_NAMES[owner]}"
            )
        if owner is _CALLER:  # nobody else's arrays could name a page twice
            self._expect_once(pages, dp_rank)

    def _expect_once(self, pages: IndexArray, dp_rank: int) -> None:
        order = np.arange(len(pages), dtype=np.int32)
        self._stamp[pages] = order
        if (self._stamp[pages] != order).any():
            at = int((self._stamp[pages] != order).argmax())
            raise InvalidIndexError(f"page {pages[at]} on dp_rank {dp_rank} is named twice")
