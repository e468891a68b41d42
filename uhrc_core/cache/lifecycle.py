"""Life of a request in the cache: admit, extend, publish, finish, abort, retract.

    match_req → [prefetch_req] → admit_req →
    (extend_req → forward → advance_req → cache_unfinished_req)* →
    cache_finished_req | abort_req | retract_req

The steps are written once, for every cache behind the base interface: they use only its
primitives and the components' contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from uhrc_core.arguments import count, integer
from uhrc_core.cache.component import StateSlots, TreeComponent
from uhrc_core.cache.hicache import NO_HICACHE, HiCacheCalls
from uhrc_core.cache.holding import RequestState
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import (
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from uhrc_core.cache.request import Request, key_of
from uhrc_core.errors import InvalidParamsError, RequestError, RequestTooLargeError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import ReqToTokenPool


class RequestLifecycle(ABC):
    """The request half of the base interface; `BasePrefixCache` adds the primitives."""

    components: Sequence[TreeComponent]
    page_size: int
    req_to_token: ReqToTokenPool
    hicache: HiCacheCalls = NO_HICACHE

    def __init__(self) -> None:
        self._live: dict[str, RequestState] = {}

    @abstractmethod
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix of ``params.key`` that every component can serve; marks it as used."""

    @abstractmethod
    def insert(self, params: InsertParams) -> InsertResult:
        """Publish a computed prefix: the tree keeps what it has and takes the rest.

        Raises a `CacheError` for what it cannot take; nothing has changed then.
        """

    @abstractmethod
    def evict(self, params: EvictParams) -> EvictResult:
        """Reclaim what is not locked, and say how much of each component, cascades included."""

    @abstractmethod
    def inc_lock_ref(self, node: UnifiedTreeNode) -> IncLockRefResult:
        """Keep everything a holder of ``node`` needs; raises `StaleNodeError` if it is gone."""

    @abstractmethod
    def dec_lock_ref(self, node: UnifiedTreeNode, params: DecLockRefParams) -> None:
        """Undo one `inc_lock_ref`; raises `ReceiptError` for a receipt that is not one of it."""

    @abstractmethod
    def release_early(self, lock: IncLockRefResult, kind: ComponentType) -> None:
        """Give up one component's part of a lock ahead of the rest."""

    # -- arrival -------------------------------------------------------------------------------

    def live_requests(self) -> Sequence[RequestState]:
        """States of all admitted requests, in order of admission."""
        return tuple(self._live.values())

    def request_state(self, rid: str) -> RequestState:
        """The state of a live request; raises `RequestError` for an unknown ``rid``."""
        state = self._live.get(rid)
        if state is None:
            raise RequestError(f"request {rid!r} is not live; admit it first (admit_req)")
        return state

    def check_fits(self, num_tokens: int) -> None:
        """Refuse a request that could not hold ``num_tokens`` even alone on empty pools.

        Raises:
            RequestTooLargeError: with the sum that shows why.
        """
        num_tokens = count("num_tokens", num_tokens)
        if num_tokens > self.req_to_token.max_context_len:
            raise RequestTooLargeError(
                f"request of {num_tokens} tokens exceeds max_context_len "
                f"{self.req_to_token.max_context_len}; raise cache.max_context_len"
            )
        for component in self.components:
            need = component.demand_alone(num_tokens)
            if need > component.allocator.capacity:
                raise RequestTooLargeError(
                    f"request of {num_tokens} tokens needs {need} {component.kind.name} units, "
                    f"the pool has {component.allocator.capacity} per dp rank in all; "
                    "enlarge the pool or shorten the request"
                )

    def match_req(self, req: Request) -> MatchResult:
        """The longest reusable prefix of the request.

        Says in ``host_hit_length`` by how much `prefetch_req` could make it longer.
        """
        params = self._reusable(key_of(req))
        match = self.match_prefix(params)
        full_len = match.full_hit_length
        match.host_hit_length = self.hicache.lookup(params.key, match.hit_len, full_len)
        return match

    def prefetch_req(self, req: Request, match: MatchResult) -> MatchResult:
        """Bring what a host tier holds of the request's prefix into the tree; its match then.

        ``match`` itself where there is nothing to bring. Call it right before `admit_req`: it may
        evict, and what it brings is not locked.

        Raises:
            InvalidParamsError: the match is not this request's.
        """
        return match

    def _reusable(self, key: RadixKey) -> MatchPrefixParams:
        """All tokens but the last, which must be computed anyway."""
        key = key.slice(0, max(len(key) - 1, 0))
        return MatchPrefixParams(key=key, cow_recurrent=True)

    def admit_req(self, req: Request, match: MatchResult, num_tokens: int) -> RequestState | None:
        """Lock the match and take what the request needs to start.

        Args:
            match: of `match_req`, with nothing evicted since.
            num_tokens: tokens that must be free or evictable beside the hit: what the request will
                compute, and what the scheduler keeps back for the requests already running.

        Returns:
            The request's state, or ``None`` when the pools cannot cover it now: nobody has lost or
            gained anything.

        Raises:
            RequestError: ``req.rid`` is live already.
            StaleNodeError: the match was evicted meanwhile.
            InvalidParamsError, InvalidKeyError: the match is not this request's or leaves nothing
                to compute, or one of the request's fields is no such thing.
        """
        key = self._check_admission(req, match)
        num_tokens = count("num_tokens", num_tokens)
        if not self.req_to_token.num_free:
            return None
        lock = self.inc_lock_ref(match.best_match_node)
        live = [state for state in self._live.values() if state.dp_rank == key.dp_rank]
        demands = [component.demand(num_tokens, live) for component in self.components]
        admits = [component.admit_demand() for component in self.components]
        if not (self._covers(demands, key.dp_rank) and self._make_room(admits, key.dp_rank)):
            self.dec_lock_ref(lock.node, lock.to_dec_params())
            return None
        row = self.req_to_token.alloc()
        assert row is not None
        self.req_to_token.write(row, 0, match.device_indices)
        state = RequestState(req, self.req_to_token, row, lock, key)
        for number, component in enumerate(self.components):
            if not component.admit(state, match):
                self._leave(state, self.components[:number])
                return None
        self._live[req.rid] = state
        return state

    def _check_admission(self, req: Request, match: MatchResult) -> RadixKey:
        """The request's key, when it may be admitted with this match; nothing has changed yet."""
        if req.rid in self._live:
            raise RequestError(f"request {req.rid!r} is live already; rids must be unique")
        integer("priority", req.priority)
        key = key_of(req)
        self.components[0].allocator.ledger.check_rank(key.dp_rank)
        if len(key) > self.req_to_token.max_context_len:
            raise RequestTooLargeError(
                f"request {req.rid!r} has {len(key)} tokens, max_context_len is "
                f"{self.req_to_token.max_context_len}"
            )
        self._check_prefix(req, key, match)
        for component in self.components:
            component.check_match(match)
        return key

    def _check_prefix(self, req: Request, key: RadixKey, match: MatchResult) -> None:
        """Raise `InvalidParamsError` unless the match is one of these tokens but the last."""
        for part in match.best_match_node.path_to_root():
            if part.key.namespace != key.namespace or not key.starts_with(part.key, part.start):
                raise InvalidParamsError(
                    f"match: {part} is not a prefix of request {req.rid!r}; match it again"
                )
        if match.hit_len >= max(len(key), 1):
            raise InvalidParamsError(
                f"match: covers all {len(key)} tokens of request {req.rid!r}, and the last must be "
                "computed; use match_req"
            )

    # -- running -------------------------------------------------------------------------------

    def extend_req(self, req: Request, num_tokens: int) -> IndexArray | None:
        """Pool indices int32[num_tokens] for the request's next tokens (a view of its row).

        Evicts what is short. ``None``: even then the pool is short (retract somebody); unchanged.
        """
        state = self.request_state(req.rid)
        start = state.allocated_len
        num_tokens = count("num_tokens", num_tokens)
        if start + num_tokens > self.req_to_token.max_context_len:
            raise InvalidParamsError(
                f"extend_req: {num_tokens} tokens after {start} do not fit max_context_len "
                f"{self.req_to_token.max_context_len}"
            )
        for component in self.components:
            component.check_extend(num_tokens)
        needs = [component.extend_demand(state, num_tokens) for component in self.components]
        if not self._make_room(needs, state.dp_rank):
            return None
        with ExitStack() as undo:
            for component in self.components:
                if not component.extend(state, num_tokens):
                    return None
                undo.callback(component.undo_extend, state, num_tokens)
            undo.pop_all()
        state.allocated_len = start + num_tokens
        return state.indices(start, state.allocated_len)

    def advance_req(self, req: Request, num_tokens: int) -> None:
        """The forward that writes the request's next ``num_tokens`` tokens has been dispatched."""
        state = self.request_state(req.rid)
        num_tokens = count("num_tokens", num_tokens)
        if state.computed_len + num_tokens > state.allocated_len:
            raise RequestError(
                f"request {req.rid!r}: cannot advance by {num_tokens} from {state.computed_len}; "
                f"only {state.allocated_len} tokens have pool indices (extend_req)"
            )
        start = state.computed_len
        state.computed_len += num_tokens
        for component in self.components:
            component.advanced(state, start)
        self._release_what_is_not_needed(state)

    def started_req(self, req: Request) -> None:
        """What the request takes from its prefix by copying has been copied (dispatched).

        Until then the source of a copy-on-write clone is locked.
        """
        state = self.request_state(req.rid)
        for component in self.components:
            component.started(state)
        self._release_what_is_not_needed(state)

    def token_indices(self, req: Request, stop: int) -> dict[ComponentType, IndexArray]:
        """Per component with an index per token, where its pool has the first ``stop`` tokens.

        int32[stop] each, to be read before the request's next step; -1 where a component no longer
        needs to have the token.
        """
        state = self.request_state(req.rid)
        if count("stop", stop) > state.allocated_len:
            raise InvalidParamsError(
                f"stop: {stop}, but request {req.rid!r} has indices for {state.allocated_len} "
                "tokens (extend_req)"
            )
        found = ((c.kind, c.token_indices(state, stop)) for c in self.components)
        return {kind: indices for kind, indices in found if indices is not None}

    def state_slots(self, req: Request, start: int, stop: int) -> StateSlots | None:
        """Slots of recurrent state for a forward over ``[start, stop)``; ``None``: no state."""
        state = self.request_state(req.rid)
        found = (component.state_slots(state, start, stop) for component in self.components)
        return next((slots for slots in found if slots is not None), None)

    def cuts(self, req: Request, start: int, stop: int) -> Sequence[int]:
        """Positions in ``(start, stop)``, ascending, where a forward of the request must end."""
        state = self.request_state(req.rid)
        return sorted({cut for c in self.components for cut in c.cuts(state, start, stop)})

    def cache_unfinished_req(self, req: Request) -> None:
        """Publish what is computed so far and move the request's lock to the end of it.

        Afterwards the request's row holds the tree's indices for that part.
        """
        state = self.request_state(req.rid)
        result = self._publish(state, finished=False)
        if result is None:
            return
        old = state.lock
        state.lock = self.inc_lock_ref(result.node)
        self.dec_lock_ref(old.node, old.to_dec_params())
        self._release_what_is_not_needed(state)

    # -- leaving -------------------------------------------------------------------------------

    def cache_finished_req(self, req: Request, is_insert: bool = True) -> None:
        """Publish what is computed (unless told not to) and free all the request holds."""
        state = self.request_state(req.rid)
        result = None
        if is_insert:
            result = self._publish(state, finished=True)
        with ExitStack() as leaving:
            leaving.callback(self._live.pop, req.rid)
            leaving.callback(self._leave, state, self.components)
            if is_insert:
                self.hicache.write_through(state.lock.node if result is None else result.node)

    def abort_req(self, req: Request) -> None:
        """Free all the request holds, publish nothing more; right at every step of its life."""
        self.cache_finished_req(req, is_insert=False)

    def retract_req(self, req: Request) -> None:
        """Give the request's memory up under pressure; it must be admitted again to go on.

        What it computed becomes evictable in the tree, so it resumes there if memory allows.
        """
        self.cache_finished_req(req, is_insert=True)

    def _release_what_is_not_needed(self, state: RequestState) -> None:
        for component in self.components:
            if not component.needs_lock(state):
                self.release_early(state.lock, component.kind)

    def _leave(self, state: RequestState, components: Sequence[TreeComponent]) -> None:
        """Give back what the request has from ``components``, its lock and its row."""
        for component in reversed(components):
            component.end(state)
        self.dec_lock_ref(state.lock.node, state.lock.to_dec_params())
        self.req_to_token.free(state.row)

    # -- steps ---------------------------------------------------------------------------------

    def _publish(self, state: RequestState, *, finished: bool) -> InsertResult | None:
        seqlen = min(state.computed_len, len(state.request.token_ids))
        known = state.key_upto(seqlen)  # raises for a token that is none, before anything changes
        priority = integer("priority", state.request.priority)
        wishes = [c.publish_demand(state, finished=finished) for c in self.components]
        self._make_room(wishes, state.dp_rank)
        for component in self.components:
            seqlen = component.prepare_publish(state, seqlen, finished=finished)
        seqlen -= seqlen % self.page_size
        if seqlen <= state.protected_len:
            return None
        fields: dict[str, Any] = {}
        for component in self.components:
            fields |= component.offer(state, seqlen)
        result = self.insert(
            InsertParams(
                key=known.slice(0, seqlen),
                value=state.indices(0, seqlen),
                prev_prefix_len=state.protected_len,
                priority=priority,
                **fields,
            )
        )
        for component in reversed(self.components):
            component.settle(state, result)
        state.protected_len = result.inserted_len
        return result

    def _covers(self, needs: Sequence[int], dp_rank: int) -> bool:
        """Whether every component's need is free or evictable."""
        return all(
            need
            <= component.allocator.available_size(dp_rank)
            + component.allocator.evictable_size(dp_rank)
            for component, need in zip(self.components, needs, strict=True)
        )

    def _make_room(self, needs: Sequence[int], dp_rank: int) -> bool:
        """Evict until every component's need is free; ``False``: it cannot be."""
        if not self._covers(needs, dp_rank):
            return False
        pools = [component.allocator for component in self.components]
        if any(n > p.available_size(dp_rank) for n, p in zip(needs, pools, strict=True)):
            amounts = {
                component.kind.evict_field: need
                for component, need in zip(self.components, needs, strict=True)
            }
            self.evict(EvictParams(dp_rank=dp_rank, shortfall=True, **amounts))
        return all(n <= p.available_size(dp_rank) for n, p in zip(needs, pools, strict=True))
