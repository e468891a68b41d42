"""RequestState: what the cache keeps for one live request."""

from __future__ import annotations

from typing import Any

from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import IncLockRefResult
from uhrc_core.cache.request import Request
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.pools.req_to_token import ReqToTokenPool


class RequestState:
    """What the cache holds for one live request; owned by the cache, read-only for the engine.

    Attributes:
        row: its row in `ReqToTokenPool`.
        cached_len: tokens it did not have to compute when it was admitted.
        protected_len: tokens of its prefix that the tree owns and it has locked (whole pages).
        computed_len: tokens whose KV a dispatched forward has written.
        allocated_len: tokens that have a pool index.
        lock: receipt of the lock on the node that ends at ``protected_len``.
        component: private to each component, by `ComponentType`.
    """

    __slots__ = (
        "allocated_len",
        "cached_len",
        "component",
        "computed_len",
        "key",
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
        self.component: list[Any] = [None] * len(ComponentType)

    @property
    def dp_rank(self) -> int:
        return self.key.dp_rank

    def indices(self, start: int, stop: int) -> IndexArray:
        """int32[stop - start] FULL indices of its tokens, a view into the table."""
        return self.table.indices(self.row, start, stop)

    def key_upto(self, seqlen: int) -> RadixKey:
        """The key of its first ``seqlen`` tokens; each token is converted once."""
        if len(self.key) < seqlen:
            self.key = self.key.extended(self.request.token_ids[len(self.key) : seqlen])
        return self.key.slice(0, seqlen)
