"""SWAComponent: sliding-window attention in the tree.

A token attends to the last ``window_tokens`` of its sequence, so its KV is of use only until the
window has passed it. The pool is small, has indices of its own (`SWATokenToKVPoolAllocator` maps
FULL indices to them), and a node may have lost its window data while FULL keeps the prefix: a
*tombstone*. A hit may end where the window before it is there without a gap.

How far a request is decides what it needs, so nothing is kept per request: once ``computed_len``
tokens are computed, it has no SWA data of its own before ``swa_evicted_seqlen(computed_len)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from uhrc_core.plugin_api import (
    ComponentType,
    EvictionPolicy,
    HostNeed,
    IndexArray,
    InsertParams,
    InsertResult,
    InvalidIndexError,
    InvalidParamsError,
    MatchResult,
    MatchValidator,
    MissReason,
    PagedIndexAllocator,
    RequestState,
    StaleNodeError,
    SWATokenToKVPoolAllocator,
    TreeComponent,
    UnifiedTreeNode,
)
from uhrc_swa.window import WindowPlan

_SWA = ComponentType.SWA


class SWAComponent(TreeComponent):
    """Values are int32[len(edge)] SWA indices, or none; see `TreeComponent` for the contract."""

    kind = _SWA
    miss_reason = MissReason.SWA_WINDOW

    def __init__(
        self,
        allocator: SWATokenToKVPoolAllocator,
        policy: EvictionPolicy,
        eviction_priority: int,
        plan: WindowPlan,
    ) -> None:
        super().__init__(allocator, policy, eviction_priority)
        self.swa_allocator = allocator
        self.plan = plan

    def join(self, components: Sequence[TreeComponent]) -> None:
        super().join(components)
        full = next(peer for peer in components if peer.kind is ComponentType.FULL)
        self._full: PagedIndexAllocator = full.allocator
        self.swa_allocator.cover(full.allocator)

    def units_at(self, node: UnifiedTreeNode) -> int:
        return len(node.key)

    # -- matching ------------------------------------------------------------------------------

    def match_validator(self) -> MatchValidator:
        """Accepts where the values up to here have no gap within the window, or none at all."""
        window = run = self.plan.window_tokens

        def accepts(node: UnifiedTreeNode, num_tokens: int) -> bool:
            nonlocal run
            run = 0 if node.component_data[_SWA].value is None else run + num_tokens
            return run >= window

        return accepts

    def refresh(self, path: Sequence[UnifiedTreeNode], now: int) -> None:
        """Only the window: what lies before it ages out."""
        for node in self._window(path[-1]) if path else ():
            self.policy.touch(self.data(node), now, hit=True)

    def _window(self, node: UnifiedTreeNode) -> Iterator[UnifiedTreeNode]:
        """The node and its ancestors, as far up as a hit at its end reads."""
        for part in node.path_to_root():
            yield part
            if node.end - part.start >= self.plan.window_tokens:
                return

    def check_match(self, match: MatchResult) -> None:
        for node in self._window(match.best_match_node):
            if self.data(node).value is None:
                raise StaleNodeError(f"the window data of {node} was evicted; match again")

    # -- structure -----------------------------------------------------------------------------

    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode) -> None:
        self.split_tokens(upper, lower)
        self.reconsider(upper)

    def check_insert(self, params: InsertParams) -> None:
        page_size = self.allocator.page_size
        if params.swa_evicted_seqlen % page_size:
            raise InvalidParamsError(
                f"swa_evicted_seqlen: {params.swa_evicted_seqlen} must be whole pages of "
                f"{page_size}"
            )
        start, stop = self._offered_from(params), params.key.page_floor(page_size)
        before = self._offered(params, params.prev_prefix_len, min(start, stop))
        if len(before) and int(before.max()) >= 0:
            at = params.prev_prefix_len + int(before.argmax())
            raise InvalidIndexError(
                f"value: token {at} (FULL index {params.value[at]}) has an SWA index, before "
                f"swa_evicted_seqlen {start}; free it (free_for)"
            )
        offered = self._offered(params, start, stop)
        if len(offered) and int(offered.min()) < 0:
            at = start + int(offered.argmin())
            raise InvalidIndexError(
                f"value: token {at} (FULL index {params.value[at]}) has no SWA index; map one "
                "(alloc_for), or say with swa_evicted_seqlen where the SWA data begins"
            )
        self.allocator.ledger.check_held(self.allocator.pages(offered), params.key.dp_rank)

    def _offered_from(self, params: InsertParams) -> int:
        """Depth from which on an insert brings SWA data."""
        return max(params.swa_evicted_seqlen, params.prev_prefix_len)

    def _offered(self, params: InsertParams, start: int, stop: int) -> IndexArray:
        return self.swa_allocator.translate(params.value[start:stop], params.key.dp_rank)

    def insert_cuts(
        self, params: InsertParams, path: Sequence[UnifiedTreeNode], prefix_len: int
    ) -> Sequence[int]:
        """Where the SWA data begins, inside a new node or a tombstone; the front stays without."""
        start = self._offered_from(params)
        if prefix_len < start < params.key.page_floor(self.allocator.page_size):
            return (start,)
        holder = next((node for node in path if node.start < start < node.end), None)
        if start < prefix_len and holder is not None and self.data(holder).value is None:
            return (start,)
        return ()

    def fill(self, node: UnifiedTreeNode, params: InsertParams, now: int) -> None:
        if node.start >= self._offered_from(params):
            self.store(node, self._offered(params, node.start, node.end), now)

    def overlap(self, node: UnifiedTreeNode, params: InsertParams, now: int) -> None:
        """A tombstone gets data again, under the FULL indices it has; the window is refreshed."""
        if self.data(node).value is None and node.start >= self._offered_from(params):
            offered = self._offered(params, node.start, node.end)
            mine = node.component_data[ComponentType.FULL].value
            assert mine is not None
            self.swa_allocator.move(params.value[node.start : node.end], mine, node.dp_rank)
            self.store(node, offered, now)
        elif node.end > params.key.page_floor(self.allocator.page_size) - self.plan.window_tokens:
            self.policy.touch(self.data(node), now, hit=False)

    # -- locks and eviction --------------------------------------------------------------------

    def lock_from(self, node: UnifiedTreeNode) -> int:
        return self.plan.swa_evicted_seqlen(node.end)

    def acquire(self, node: UnifiedTreeNode) -> object:
        """Locks what is kept of a sequence that ends here.

        A node ends where that begins (`lock_from`), and always will: a split moves no end.
        """
        for part in self.locked_by(node, True):
            self.lock_one(part)
        return True

    def release(self, node: UnifiedTreeNode, token: object) -> None:
        for part in self.locked_by(node, token):
            self.unlock_one(part)

    def locked_by(self, node: UnifiedTreeNode, token: object) -> Iterable[UnifiedTreeNode]:
        start = self.lock_from(node)
        return takewhile(lambda part: part.end > start, node.path_to_root())

    def is_candidate(self, node: UnifiedTreeNode) -> bool:
        data = node.component_data[_SWA]
        return data.value is not None and data.lock_ref == 0

    def gives_hit(self, node: UnifiedTreeNode) -> bool:
        return node.component_data[_SWA].value is not None

    # -- life of a request ---------------------------------------------------------------------

    def demand(self, num_tokens: int, live: Sequence[RequestState]) -> int:
        """The tokens, or what all windows can grow by if that is less."""
        most = self.plan.request_owned_tokens
        growth = sum(max(most - self._num_owned(state), 0) for state in live)
        return min(self.allocator.page_ceil(num_tokens), most + growth)

    def demand_alone(self, num_tokens: int) -> int:
        return min(self.allocator.page_ceil(num_tokens), self.plan.request_tokens)

    def token_indices(self, state: RequestState, stop: int) -> IndexArray:
        start = min(self._evicted_seqlen(state), stop)
        kept = self.swa_allocator.translate(state.indices(start, stop), state.dp_rank)
        return np.concatenate([np.full(start, -1, np.int32), kept])

    def needs_lock(self, state: RequestState) -> bool:
        """Until the window has moved past the prefix."""
        return self._evicted_seqlen(state) < state.protected_len

    def _evicted_seqlen(self, state: RequestState) -> int:
        return self.plan.swa_evicted_seqlen(state.computed_len)

    def check_extend(self, num_tokens: int) -> None:
        most = self.plan.extend_tokens
        if num_tokens > most:
            raise InvalidParamsError(
                f"num_tokens: {num_tokens} at once, and window pools are sized for {most}; extend "
                "in steps, or raise components.swa.extend_tokens"
            )

    def extend(self, state: RequestState, num_tokens: int) -> bool:
        fresh = self.swa_allocator.alloc_for_fresh(self._fresh(state, num_tokens), state.dp_rank)
        if fresh is None:
            return False
        self.allocator.claim(fresh, state.dp_rank)
        return True

    def undo_extend(self, state: RequestState, num_tokens: int) -> None:
        self._give_up(state, self._fresh(state, num_tokens))

    def _fresh(self, state: RequestState, num_tokens: int) -> IndexArray:
        """FULL indices of the pages that ``num_tokens`` more tokens begin."""
        stop = state.allocated_len + num_tokens
        return state.indices(min(self.allocator.page_ceil(state.allocated_len), stop), stop)

    def advanced(self, state: RequestState, start: int) -> None:
        """Free what the window has moved past."""
        had, gone = self.plan.swa_evicted_seqlen(start), self._evicted_seqlen(state)
        first = max(had, state.protected_len)
        if first < gone:
            self._give_up(state, state.indices(first, gone))

    def offer(self, state: RequestState, seqlen: int) -> Mapping[str, Any]:
        self.allocator.unclaim(self._mapped(state, self._own(state, seqlen)), state.dp_rank)
        return {"swa_evicted_seqlen": self._evicted_seqlen(state)}

    def settle(self, state: RequestState, result: InsertResult) -> None:
        """Free the duplicates; what a tombstone took is mapped from the tree's indices now."""
        self.swa_allocator.free_for(self._own(state, result.prefix_len), state.dp_rank)

    def end(self, state: RequestState) -> None:
        self._give_up(state, self._own(state, state.allocated_len))

    def held_by(self, state: RequestState) -> IndexArray:
        return self._mapped(state, self._own(state, state.allocated_len))

    def _own(self, state: RequestState, stop: int) -> IndexArray:
        """FULL indices of the request's tokens before ``stop`` whose SWA data is its own."""
        start = max(self._evicted_seqlen(state), state.protected_len)
        return state.indices(min(start, stop), stop)

    def _num_owned(self, state: RequestState) -> int:
        start = max(self._evicted_seqlen(state), state.protected_len)
        return self.allocator.page_ceil(max(state.allocated_len - start, 0))

    def _mapped(self, state: RequestState, full_indices: IndexArray) -> IndexArray:
        return self.swa_allocator.translate(full_indices, state.dp_rank)

    def _give_up(self, state: RequestState, full_indices: IndexArray) -> None:
        self.allocator.unclaim(self._mapped(state, full_indices), state.dp_rank)
        self.swa_allocator.free_for(full_indices, state.dp_rank)

    # -- host tier -----------------------------------------------------------------------------

    def host_need(self, hit_len: int, full_len: int, stop: int) -> HostNeed | None:
        """The window before ``stop``, or what continues a hit that ends where FULL does.

        A window that begins where the device still has FULL data is not brought back: it would
        fill tombstones in part.
        """
        window = self.allocator.page_ceil(self.plan.window_tokens)
        start = max(stop - window, full_len if full_len == hit_len else 0)
        return HostNeed(_SWA, start, stop, stop - start) if start >= full_len else None

    def take_for_host(
        self, need: HostNeed, full_indices: IndexArray, dp_rank: int
    ) -> IndexArray | None:
        return self.swa_allocator.alloc_for(full_indices[need.start : need.stop], dp_rank)

    def host_fields(self, need: HostNeed, indices: IndexArray) -> Mapping[str, Any]:
        return {"swa_evicted_seqlen": need.start}

    # -- audit ---------------------------------------------------------------------------------

    def problems(
        self, nodes: Sequence[UnifiedTreeNode], live: Sequence[RequestState]
    ) -> Iterator[str]:
        """The map is what nodes and requests say, and never leads to or from a free page."""
        for node in nodes:
            full, value = node.component_data[ComponentType.FULL].value, self.data(node).value
            if full is None:
                continue  # a rule of the tree's own
            mapped = self.swa_allocator.translate(full, node.dp_rank)
            expected = np.full(len(full), -1, np.int32) if value is None else value
            if not np.array_equal(mapped, expected):
                yield f"{node}: its FULL indices are mapped to {mapped}, its SWA data is {expected}"
        for state in live:
            if (self.held_by(state) < 0).any():
                yield f"request {state.request.rid!r}: part of its window has no SWA index"
        for dp_rank in range(self.allocator.dp_size):
            full, here = self.swa_allocator.mapped_pages(dp_rank)
            free = np.isin(full, self._full.free_pages(dp_rank))
            free |= np.isin(here, self.allocator.free_pages(dp_rank))
            if free.any() or len(np.unique(here)) < len(here):
                yield f"SWA on dp_rank {dp_rank}: mapped FULL pages {full} to {here}, some free"
