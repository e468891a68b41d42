"""BasePrefixCache: the interface of every prefix cache here, unified tree and baselines alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.events import CacheEvent
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.lifecycle import RequestLifecycle
from uhrc_core.cache.locks import Grants, ReceiptBook
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import (
    CacheStats,
    EvictParams,
    IncLockRefResult,
    Insertion,
    InsertParams,
    InsertResult,
)
from uhrc_core.combination import check_components
from uhrc_core.errors import InvalidParamsError, RequestError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedIndexAllocator, ReqToTokenPool
from uhrc_core.pools.ledger import Owner


class BasePrefixCache(RequestLifecycle):
    """Match, insert, evict and lock prefixes; carry requests through their life (RFC 4.6).

    Args:
        components: at most one per `ComponentType`, FULL among them; each brings its allocator.
        page_size: tokens per page; keys are cut down to whole pages.
        dp_size: data-parallel ranks, each with its own pools and its own prefixes.
        max_requests: rows of the request table.
        max_context_len: tokens a request may hold.

    Not thread-safe: one scheduler thread drives it. Deterministic: equal calls give equal states.
    """

    #: Kinds of components this cache can hold.
    _serves = frozenset(ComponentType)

    def __init__(
        self,
        components: Sequence[TreeComponent],
        *,
        page_size: int,
        dp_size: int = 1,
        max_requests: int,
        max_context_len: int,
    ) -> None:
        super().__init__()
        by_kind = {component.kind: component for component in components}
        if len(by_kind) < len(components) or ComponentType.FULL not in by_kind:
            kinds = [component.kind.name for component in components]
            raise InvalidParamsError(f"components: need FULL and no kind twice, got {kinds}")
        check_components({kind: each.eviction_priority for kind, each in by_kind.items()})
        if unserved := [kind.name for kind in by_kind if kind not in self._serves]:
            raise InvalidParamsError(
                f"{type(self).__name__} does not hold {', '.join(unserved)} data; set "
                "cache.enable_unified_radix_tree"
            )
        self.components = tuple(by_kind[kind] for kind in sorted(by_kind))
        self.page_size = page_size
        self.dp_size = dp_size
        self.req_to_token = ReqToTokenPool(max_requests, max_context_len)
        self._by_kind = by_kind
        self._receipts = ReceiptBook()
        self._start_empty()

    @property
    def token_allocator(self) -> PagedIndexAllocator:
        """The FULL pool's allocator: where a caller takes token indices from."""
        return self._by_kind[ComponentType.FULL].allocator

    def evictable_size(self, kind: ComponentType, dp_rank: int = 0) -> int:
        """Units the tree holds and would give up: tokens (FULL, SWA) or slots (RECURRENT)."""
        return self._pool(kind, dp_rank).evictable_size(dp_rank)

    def protected_size(self, kind: ComponentType, dp_rank: int = 0) -> int:
        """Units the tree holds under lock."""
        return self._pool(kind, dp_rank).protected_size(dp_rank)

    def available_size(self, kind: ComponentType, dp_rank: int = 0) -> int:
        """Units no one holds."""
        return self._pool(kind, dp_rank).available_size(dp_rank)

    def _pool(self, kind: ComponentType, dp_rank: int) -> PagedIndexAllocator:
        component = self._by_kind.get(kind)
        if component is None:
            has = ", ".join(c.kind.name for c in self.components)
            raise InvalidParamsError(f"kind: this cache has no {kind!r} component; it has {has}")
        component.allocator.ledger.check_rank(dp_rank)
        return component.allocator

    def _check_amounts(self, params: EvictParams) -> None:
        """Raise `InvalidParamsError` for an unknown rank, or units of a component not here."""
        for kind in ComponentType:
            if kind is ComponentType.FULL or params.amount(kind):
                self._pool(kind, params.dp_rank)

    def insert(self, params: InsertParams) -> InsertResult:
        """Publish a computed prefix; the tree keeps what it has and takes the rest.

        Raises:
            InvalidParamsError: lengths that contradict each other or the tree, or data of a
                component that is not here.
            InvalidIndexError: new indices that the caller does not hold, or not whole pages.
        """
        key, start = params.key, params.prev_prefix_len
        self.token_allocator.ledger.check_rank(key.dp_rank)
        if len(params.value) != len(key) - start:
            raise InvalidParamsError(
                f"value: {len(params.value)} indices for the tokens [{start}, {len(key)}) of the "
                "key; pass one FULL index per token after prev_prefix_len"
            )
        length = key.page_floor(self.page_size)
        if start % self.page_size or start > length:
            raise InvalidParamsError(
                f"prev_prefix_len: {start} must be whole pages of {self.page_size} within the key"
            )
        self._check_kinds(params)
        offered = Insertion(
            key.prefix(length),
            start,
            params.value[: length - start],
            Owner.CALLER,
            params.priority,
            params.swa_evicted_seqlen,
            params.recurrent_value,
            params.recurrent_seqlen,
        )
        return self._insert(offered, None)

    def _check_kinds(self, params: InsertParams) -> None:
        """Raise `InvalidParamsError` for data of a component not here."""
        if params.recurrent_value is not None:
            self._pool(ComponentType.RECURRENT, params.key.dp_rank)
        if params.swa_evicted_seqlen:
            self._pool(ComponentType.SWA, params.key.dp_rank)

    def release_early(self, lock: IncLockRefResult, kind: ComponentType) -> None:
        """Give up one component's part of a lock ahead of the rest; once done, does nothing.

        The final `dec_lock_ref` then skips that part.

        Raises:
            InvalidParamsError: FULL's part, which all others rest on, or a kind that is not here.
        """
        self._pool(kind, lock.node.dp_rank)
        if kind is ComponentType.FULL:
            raise InvalidParamsError(
                "kind: FULL's part of a lock is held to the end (dec_lock_ref)"
            )
        index = [component.kind for component in self.components].index(kind)
        grant = self._receipts.take_part(lock.node, lock.to_dec_params(), index)
        if grant is not None:
            self.components[index].release(lock.node, grant)

    def receipts(self) -> Iterator[tuple[int, UnifiedTreeNode, Grants]]:
        """Number, anchor and grants of every lock not yet released."""
        return self._receipts.outstanding()

    def num_receipts(self) -> int:
        """Locks acquired and not yet released."""
        return len(self._receipts)

    @abstractmethod
    def _start_empty(self) -> None:
        """Make the tree an empty one."""

    @abstractmethod
    def nodes(self) -> list[UnifiedTreeNode]:
        """All nodes, oldest first, the root first of all; for audits and tests."""

    @abstractmethod
    def clock(self) -> int:
        """The access counter."""

    @abstractmethod
    def peek_prefix_len(self, key: RadixKey) -> int:
        """The hit length, in tokens, that `match_prefix` would give; changes nothing."""

    @abstractmethod
    def check_invariants(
        self, held: Mapping[ComponentType, Sequence[IndexArray]] | None = None
    ) -> None:
        """Verify every rule of the cache's state; raise `InvariantError` with a dump of it.

        Args:
            held: per component and then per dp rank, indices the caller took from an allocator
                outside any live request.
        """

    @abstractmethod
    def digest(self) -> str:
        """A hash of the whole state, equal on every host that made the same calls."""

    @abstractmethod
    def stats(self) -> CacheStats:
        """Running totals; a copy."""

    @abstractmethod
    def take_events(self) -> list[CacheEvent]:
        """What changed in the tree since the last call."""

    @abstractmethod
    def pretty_print(self) -> str:
        """The tree as text, one node a line."""

    def reset(self) -> None:
        """Forget every prefix and free every index.

        Raises:
            RequestError: requests are live or locks held; end those first.
        """
        if self._live or self._receipts:
            raise RequestError(
                f"reset: {len(self._live)} request(s) are live ({', '.join(self._live)}) and "
                f"{len(self._receipts)} lock(s) held; finish or abort, and release them first"
            )
        for component in self.components:
            component.reset()
        self.req_to_token.reset()
        self._start_empty()
        self.hicache.reset()
