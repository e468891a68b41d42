"""Holding: the contract's second half, what one live request holds of one component.

A `TreeComponent` answers for the tree. When a request is admitted, each component makes it a
`Holding`, which has the life of the request: where its forwards must end, the pool space it takes
and gives back, what it publishes. A holding knows its request's `RequestState` and nobody else's.

The row of a request in `ReqToTokenPool`, whose entries are the FULL indices of its tokens::

    [0, protected_len)              the tree's, locked by the request
    [protected_len, prefix_len)     the request's, double: another request published them first.
                                    They are freed, and the row takes the tree's indices
    [prefix_len, inserted_len)      the request's, given to the tree
    [inserted_len, allocated_len)   the request's, kept: the last page in part, tokens not computed

The two inner borders exist only while a publish is under way. After it ``protected_len`` has the
value that ``inserted_len`` had.
"""

# ruff: noqa: B027 - an empty method here is a default: most components have nothing to do there.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import IncLockRefResult, InsertResult
from uhrc_core.cache.request import Request
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedIndexAllocator, ReqToTokenPool

#: Evicts until so many units of the component are free; answers whether they are.
MakeRoom = Callable[[int], bool]


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


class Offer(NamedTuple):
    """What a holding has for an insert of its request's first ``seqlen`` tokens.

    Attributes:
        seqlen: no more than was asked for.
        fields: what it adds to the `Insertion`.
    """

    seqlen: int
    fields: Mapping[str, Any] = {}


class RequestState:
    """What the cache holds for one live request; owned by the cache, read-only for the engine.

    Attributes:
        row: its row in `ReqToTokenPool`.
        dp_rank: the rank whose pools it uses.
        key: its first tokens, up to where somebody has asked; each token is converted once.
        cached_len: tokens it did not have to compute when it was admitted.
        protected_len: tokens of its prefix that the tree owns and it has locked (whole pages).
        computed_len: tokens whose KV a dispatched forward has written.
        allocated_len: tokens that have a pool index.
        lock: receipt of the lock on the node that ends at ``protected_len``.
        leaf: the node that its last publish made or grew; ``None``: it made no node.
        holdings: one a component, in the cache's order.
    """

    __slots__ = (
        "allocated_len",
        "cached_len",
        "computed_len",
        "dp_rank",
        "holdings",
        "key",
        "leaf",
        "lock",
        "protected_len",
        "request",
        "row",
        "table",
    )

    def __init__(
        self,
        request: Request,
        table: ReqToTokenPool,
        row: int,
        lock: IncLockRefResult,
        key: RadixKey,
    ) -> None:
        hit = lock.node.end
        self.request = request
        self.table = table
        self.row = row
        self.lock = lock
        self.cached_len = self.protected_len = self.computed_len = self.allocated_len = hit
        self.key = key
        self.dp_rank = key.dp_rank
        self.leaf: UnifiedTreeNode | None = None
        self.holdings: tuple[Holding, ...] = ()

    def indices(self, start: int, stop: int) -> IndexArray:
        """int32[stop - start] FULL indices of its tokens, a view into the table."""
        return self.table.indices(self.row, start, stop)

    def key_upto(self, seqlen: int) -> RadixKey:
        """The key of its first ``seqlen`` tokens, sharing `key`'s memory."""
        if len(self.key) < seqlen:
            self.key = self.key.extended(self.request.token_ids[len(self.key) : seqlen])
        return self.key if len(self.key) == seqlen else self.key.prefix(seqlen)

    def holding(self, kind: ComponentType) -> Holding:
        """Its holding of one component; raises KeyError for one that the cache does not have."""
        for holding in self.holdings:
            if holding.kind is kind:
                return holding
        raise KeyError(kind)


class Holding(ABC):
    """What one live request holds of one component, from its admission to its end.

    Attributes:
        kind: the component's.
        state: the request's.
        locked: whether the component's part of the request's lock is still held; the cache says so.
    """

    kind: ComponentType

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.locked = True

    # -- a step --------------------------------------------------------------------------------

    def cuts(self, start: int, stop: int) -> Sequence[int]:
        """Positions in ``(start, stop)``, ascending, where a forward of the request must end."""
        return ()

    def state_slots(self, start: int, stop: int) -> StateSlots | None:
        """Where a forward over ``[start, stop)`` reads and leaves recurrent state, if there is
        any."""
        return None

    def started(self) -> None:
        """The copy that `StateSlots.clone_src` asked for has been dispatched."""

    def page_table(self, stop: int) -> IndexArray | None:
        """int32[n_pages], read-only: the pages that hold the request's first ``stop`` tokens.

        -1 stands for a page that the request no longer needs. ``None``: the pool has no index per
        token. The table grows with the request, so asking is O(1); its next step may change it.
        """
        return None

    def check_extend(self, num_tokens: int) -> None:
        """Raise `InvalidParamsError` if no request may be extended by so many tokens at once."""

    @abstractmethod
    def extend_demand(self, num_tokens: int) -> int:
        """Units that `extend` takes for the request's next ``num_tokens`` tokens."""

    @abstractmethod
    def extend(self, num_tokens: int) -> bool:
        """Take pool space for the request's next tokens; ``False``: none was to be had."""

    @abstractmethod
    def undo_extend(self, num_tokens: int) -> None:
        """Give back what `extend` took, since another component could not follow."""

    def advanced(self, start: int) -> None:
        """The forward over ``[start, state.computed_len)`` has been dispatched."""

    def needs_lock(self) -> bool:
        """Whether the request still needs this component's part of its lock on its prefix."""
        return True

    # -- publishing ----------------------------------------------------------------------------

    def publishable_len(self, num_tokens: int) -> int:
        """How many of its first ``num_tokens`` tokens the request can give to others as it runs,
        once they are computed."""
        return num_tokens

    def offer(self, seqlen: int, make_room: MakeRoom | None) -> Offer | None:
        """What the request can publish, up to ``seqlen`` tokens; ``None``: nothing now.

        A publish asks each holding once, from the last component to FULL, and each about the tokens
        that the one before it has left.
        Nothing changes hands before the insert is certain: the tree then takes over what was
        offered, and `published` follows.

        Args:
            make_room: evicts for a unit that replaces one given away; ``None``: the request ends.
        """
        return Offer(seqlen)

    @abstractmethod
    def published(self, result: InsertResult) -> None:
        """The insert is done: free what was double, note what the tree took over.

        From the last component to FULL, so that the others still find the indices that the request
        offered; ``state.protected_len`` is still what it was.
        """

    # -- the end -------------------------------------------------------------------------------

    @abstractmethod
    def end(self) -> None:
        """Free everything the request still owns; called on every exit, exactly once."""

    @abstractmethod
    def owned(self) -> IndexArray:
        """int32[n], a copy: every index the request owns (not the tree's); for the audit."""

    def digest(self) -> tuple[int, ...]:
        """What decides the request's future beside its lengths and the indices that it owns; for
        `BasePrefixCache.digest`."""
        return ()


class TokenHolding(Holding):
    """A holding with one page of the pool for each page of tokens: what FULL and SWA share.

    Its page table has the request's pages in order, the tree's among them.
    """

    def __init__(self, state: RequestState, allocator: PagedIndexAllocator) -> None:
        super().__init__(state)
        self.allocator = allocator
        self.page_size = allocator.page_size
        self._pages: IndexArray = np.empty(
            -(-state.table.max_context_len // self.page_size), np.int32
        )

    def page_table(self, stop: int) -> IndexArray:
        table = self._pages[: -(-stop // self.page_size)]
        table.flags.writeable = False
        return table

    def extend_demand(self, num_tokens: int) -> int:
        first, stop = self.new_pages(num_tokens)
        return (stop - first) * self.page_size

    def new_pages(self, num_tokens: int) -> tuple[int, int]:
        """``(first, stop)``: where the pages that its next tokens begin stand in its page table."""
        length = self.state.allocated_len
        return -(-length // self.page_size), -(-(length + num_tokens) // self.page_size)

    def pages(self, start: int, stop: int) -> IndexArray:
        """int32[n], a view: its pages of tokens ``[start, stop)``; ``start`` in whole pages."""
        return self._pages[start // self.page_size : -(-stop // self.page_size)]
