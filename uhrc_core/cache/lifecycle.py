"""Life of a request in the cache: admit, extend, publish, finish, abort, retract.

    match_req → [prefetch_req] → admit_req →
    (extend_req → forward → advance_req → cache_unfinished_req)* →
    cache_finished_req | abort_req | retract_req

The steps are written once, for every cache behind the base interface: they use only its
primitives, the components and their holdings.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from uhrc_core.arguments import count, integer
from uhrc_core.cache.hicache import NO_HICACHE, HiCacheCalls
from uhrc_core.cache.holding import RequestState, StateSlots
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import (
    DecLockRefParams,
    IncLockRefResult,
    Insertion,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from uhrc_core.cache.request import Request, key_of
from uhrc_core.cache.room import MakesRoom
from uhrc_core.errors import InvalidParamsError, RequestError, RequestTooLargeError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import ReqToTokenPool
from uhrc_core.pools.ledger import Owner

_REQUEST = Owner.REQUEST  # an enum's members are slow to look up


class RequestLifecycle(MakesRoom):
    """The request half of the base interface; `BasePrefixCache` adds the primitives."""

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
    def _insert(self, insertion: Insertion, holder: RequestState | None) -> InsertResult:
        """`insert` of what is checked already, or is offered by the live request ``holder``."""

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
        key = key_of(req)
        params = self._reusable(key)
        match = self.match_prefix(params)
        full_len = match.full_hit_length
        match.host_hit_length = self.hicache.lookup(params.key, match.hit_len, full_len)
        match.request, match.key = req, key
        return match

    def prefetch_req(self, req: Request, match: MatchResult) -> MatchResult:
        """Bring what a host tier holds of the request's prefix into the tree, and match it anew.

        That is ``match`` itself where there is nothing to bring. Call it right before `admit_req`:
        it may evict, and what it brings is not locked.

        Raises:
            InvalidParamsError: the match is not this request's.
        """
        return match

    def _reusable(self, key: RadixKey) -> MatchPrefixParams:
        """All tokens but the last, which must be computed anyway."""
        return MatchPrefixParams(key=key.prefix(max(len(key) - 1, 0)), cow_recurrent=True)

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
                to compute, or a field of the request has no valid value.
        """
        key = self._check_admission(req, match)
        num_tokens = count("num_tokens", num_tokens)
        if not self.req_to_token.num_free:
            return None
        with ExitStack() as undo:
            lock = self.inc_lock_ref(self._node_of(match))
            undo.callback(self.dec_lock_ref, lock.node, lock.to_dec_params())
            live = [state for state in self._live.values() if state.dp_rank == key.dp_rank]
            demands = [component.demand(num_tokens, live) for component in self.components]
            admits = [component.admit_demand() for component in self.components]
            if not (self._covers(demands, key.dp_rank) and self._make_room(admits, key.dp_rank)):
                return None
            row = self.req_to_token.alloc()
            assert row is not None
            undo.callback(self.req_to_token.free, row)
            self.req_to_token.write(row, 0, match.device_indices)
            state = RequestState(req, self.req_to_token, row, lock, key)
            for component in self.components:
                holding = component.admit(state, match)
                if holding is None:
                    return None
                undo.callback(holding.end)
                state.holdings += (holding,)
            self._live[req.rid] = state
            undo.pop_all()
        return state

    def _check_admission(self, req: Request, match: MatchResult) -> RadixKey:
        """The request's key, when it may be admitted with this match; nothing has changed yet."""
        if req.rid in self._live:
            raise RequestError(f"request {req.rid!r} is live already; rids must be unique")
        integer("priority", req.priority)
        key = self._key_for(req, match)
        if len(key) > self.req_to_token.max_context_len:
            raise RequestTooLargeError(
                f"request {req.rid!r} has {len(key)} tokens, max_context_len is "
                f"{self.req_to_token.max_context_len}"
            )
        for component in self.components:
            component.check_match(match)
        return key

    def _key_for(self, req: Request, match: MatchResult) -> RadixKey:
        """The request's key; raises `InvalidParamsError` unless the match is a prefix of all its
        tokens but the last."""
        known = match.key if match.request is req else None
        if (
            known is not None
            and known.namespace == (req.extra_key, req.dp_rank)
            and len(known) <= len(req.token_ids)
        ):
            return known  # `match_req` made both of this request
        key = key_of(req)
        self.components[0].allocator.ledger.check_rank(key.dp_rank)
        for part in match.best_match_node.path_to_root():
            # The node may have grown since: what lies beyond the hit is not the match's.
            edge = part.key.slice(0, max(match.hit_len - part.start, 0))
            if part.key.namespace != key.namespace or not key.starts_with(edge, part.start):
                raise InvalidParamsError(
                    f"match: {part} is not a prefix of request {req.rid!r}; match it again"
                )
        if match.hit_len >= max(len(key), 1):
            raise InvalidParamsError(
                f"match: covers all {len(key)} tokens of request {req.rid!r}, and the last must be "
                "computed; use match_req"
            )
        return key

    def _node_of(self, match: MatchResult) -> UnifiedTreeNode:
        """The node that ends where the match does; it may have grown since."""
        return match.best_match_node

    # -- running -------------------------------------------------------------------------------

    def extend_req(self, req: Request, num_tokens: int) -> IndexArray | None:
        """Pool indices int32[num_tokens] for the request's next tokens (a view of its row).

        Evicts what is short. ``None``: the pool is short even then, and nothing has changed;
        retract somebody.
        """
        state = self.request_state(req.rid)
        start = state.allocated_len
        num_tokens = count("num_tokens", num_tokens)
        if start + num_tokens > self.req_to_token.max_context_len:
            raise InvalidParamsError(
                f"extend_req: {num_tokens} tokens after {start} do not fit max_context_len "
                f"{self.req_to_token.max_context_len}"
            )
        for holding in state.holdings:
            holding.check_extend(num_tokens)
        if not self._extend(state, num_tokens):
            needs = [holding.extend_demand(num_tokens) for holding in state.holdings]
            if not (self._make_room(needs, state.dp_rank) and self._extend(state, num_tokens)):
                return None
        state.allocated_len = start + num_tokens
        return state.indices(start, state.allocated_len)

    def _extend(self, state: RequestState, num_tokens: int) -> bool:
        """Take pool space of every component, or of none."""
        taken = 0
        try:
            for holding in state.holdings:
                if not holding.extend(num_tokens):
                    break
                taken += 1
        finally:
            complete = taken == len(state.holdings)
            for holding in () if complete else state.holdings[:taken][::-1]:
                holding.undo_extend(num_tokens)
        return complete

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
        for holding in state.holdings:
            holding.advanced(start)
        self._release_what_is_not_needed(state)

    def started_req(self, req: Request) -> None:
        """What the request takes from its prefix by copying has been copied (dispatched).

        Until then the source of a copy-on-write clone is locked.
        """
        state = self.request_state(req.rid)
        for holding in state.holdings:
            holding.started()
        self._release_what_is_not_needed(state)

    def page_tables(self, req: Request, stop: int) -> dict[ComponentType, IndexArray]:
        """Per component with an index per token, which pages hold the request's first ``stop``
        tokens, in order.

        int32[n_pages] each, read-only, to be read before the request's next step; -1 stands for a
        page that the component no longer needs. O(1): the tables grow with the request.
        """
        state = self._state_with(req, stop)
        found = ((holding.kind, holding.page_table(stop)) for holding in state.holdings)
        return {kind: table for kind, table in found if table is not None}

    def token_indices(self, req: Request, stop: int) -> dict[ComponentType, IndexArray]:
        """`page_tables` spelled out: int32[stop] indices, one a token, or -1. O(stop)."""
        offsets = np.arange(self.page_size, dtype=np.int32)
        return {
            kind: np.where(pages[:, None] < 0, -1, pages[:, None] * self.page_size + offsets)
            .reshape(-1)[:stop]
            .astype(np.int32)
            for kind, pages in self.page_tables(req, stop).items()
        }

    def _state_with(self, req: Request, stop: int) -> RequestState:
        state = self.request_state(req.rid)
        if count("stop", stop) > state.allocated_len:
            raise InvalidParamsError(
                f"stop: {stop}, but request {req.rid!r} has indices for {state.allocated_len} "
                "tokens (extend_req)"
            )
        return state

    def state_slots(self, req: Request, start: int, stop: int) -> StateSlots | None:
        """Slots of recurrent state for a forward over ``[start, stop)``; ``None``: no state."""
        state = self.request_state(req.rid)
        found = (holding.state_slots(start, stop) for holding in state.holdings)
        return next((slots for slots in found if slots is not None), None)

    def cuts(self, req: Request, start: int, stop: int) -> Sequence[int]:
        """Positions in ``(start, stop)``, ascending, where a forward of the request must end."""
        state = self.request_state(req.rid)
        return sorted({cut for holding in state.holdings for cut in holding.cuts(start, stop)})

    def publishable_len(self, req: Request, num_tokens: int) -> int:
        """How many of its first ``num_tokens`` tokens the request can give to others while it runs,
        once they are computed: whole pages, and no more than every component can."""
        for holding in reversed(self.request_state(req.rid).holdings):
            num_tokens = holding.publishable_len(num_tokens)
        return num_tokens

    def cache_unfinished_req(self, req: Request) -> None:
        """Publish what is computed so far and move the request's lock to the end of it.

        Afterwards the request's row holds the tree's indices for that part.
        """
        state = self.request_state(req.rid)
        result = self._publish(state, finished=False)
        if result is None:
            return
        old = state.lock
        if result.node is old.node:
            return  # it has grown, and FULL's lock covers all of it; other data it has none
        state.lock = self.inc_lock_ref(result.node)
        self.dec_lock_ref(old.node, old.to_dec_params())
        for holding in state.holdings:
            holding.locked = True
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
            leaving.callback(self._leave, state)
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
        for holding in state.holdings:
            if holding.locked and not holding.needs_lock():
                self.release_early(state.lock, holding.kind)
                holding.locked = False

    def _leave(self, state: RequestState) -> None:
        """Give back what the request has, its lock and its row."""
        with ExitStack() as leaving:  # whatever one of them raises, the others give back theirs
            leaving.callback(self.req_to_token.free, state.row)
            leaving.callback(self.dec_lock_ref, state.lock.node, state.lock.to_dec_params())
            for holding in state.holdings:
                leaving.callback(holding.end)

    # -- steps ---------------------------------------------------------------------------------

    def _publish(self, state: RequestState, *, finished: bool) -> InsertResult | None:
        """Insert what is computed; the regions of the request's row are drawn in `holding`."""
        seqlen = min(state.computed_len, len(state.request.token_ids))
        known = state.key_upto(seqlen)  # raises for an invalid token, before anything changes
        priority = integer("priority", state.request.priority)
        fields: dict[str, Any] = {}
        for holding in reversed(state.holdings):
            make_room = None if finished else partial(self._make_room_for, holding, state.dp_rank)
            offer = holding.offer(seqlen, make_room)
            if offer is None:
                return None
            seqlen = offer.seqlen
            fields |= offer.fields
        start = state.protected_len
        if seqlen <= start:
            return None
        key = known if len(known) == seqlen else known.prefix(seqlen)
        value = state.indices(start, seqlen)
        result = self._insert(
            Insertion(key, start, value, _REQUEST, priority=priority, **fields), state
        )
        for holding in reversed(state.holdings):
            holding.published(result)
        state.protected_len = result.inserted_len
        state.leaf = result.node if result.prefix_len < result.inserted_len else None
        return result
