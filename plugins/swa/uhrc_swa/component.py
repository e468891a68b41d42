"""SWAComponent: sliding-window attention in the tree.

A token attends to the last ``window_tokens`` of its sequence, so its KV is of use only until the
window has passed it. The pool is small, has indices of its own (`SWATokenToKVPoolAllocator` maps
FULL indices to them), and a node may have lost its window data while FULL keeps the prefix: a
*tombstone*. A hit may end where the window before it is there without a gap.

What a live request has of its window is its `SWAHolding`.
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
    Insertion,
    InvalidIndexError,
    InvalidParamsError,
    MatchResult,
    MatchValidator,
    MissReason,
    RequestState,
    StaleNodeError,
    SWATokenToKVPoolAllocator,
    TreeComponent,
    UnifiedTreeNode,
)
from uhrc_swa.holding import SWAHolding
from uhrc_swa.window import WindowPlan

_SWA = ComponentType.SWA


def _holding_of(state: RequestState) -> SWAHolding:
    holding = state.holding(_SWA)
    assert isinstance(holding, SWAHolding)
    return holding


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

    def check_insert(self, insertion: Insertion) -> None:
        page_size = self.allocator.page_size
        if insertion.swa_evicted_seqlen % page_size:
            raise InvalidParamsError(
                f"swa_evicted_seqlen: {insertion.swa_evicted_seqlen} must be whole pages of "
                f"{page_size}"
            )
        start, stop = insertion.swa_start, len(insertion.key)
        before = self._offered(insertion, insertion.start, min(start, stop))
        if len(before) and int(before.max()) >= 0:
            at = int(before.argmax())
            raise InvalidIndexError(
                f"value: token {insertion.start + at} (FULL index {insertion.value[at]}) has an "
                f"SWA index, before swa_evicted_seqlen {start}; free it (free_for)"
            )
        offered = self._offered(insertion, min(start, stop), stop)
        if len(offered) and int(offered.min()) < 0:
            at = start + int(offered.argmin())
            raise InvalidIndexError(
                f"value: token {at} (FULL index {insertion.value[at - insertion.start]}) has no "
                "SWA index; map one (alloc_for), or say with swa_evicted_seqlen where the SWA "
                "data begins"
            )
        self.allocator.ledger.check_held(self.allocator.pages(offered), insertion.key.dp_rank)

    def _offered(self, insertion: Insertion, start: int, stop: int) -> IndexArray:
        indices = insertion.indices(start, stop)
        return self.swa_allocator.translate(indices, insertion.key.dp_rank)

    def insert_cuts(
        self, insertion: Insertion, path: Sequence[UnifiedTreeNode], prefix_len: int
    ) -> Sequence[int]:
        """Where the SWA data begins, inside a new node or a tombstone; the front stays without."""
        start = insertion.swa_start
        if prefix_len < start < len(insertion.key):
            return (start,)
        holder = next((node for node in path if node.start < start < node.end), None)
        if start < prefix_len and holder is not None and self.data(holder).value is None:
            return (start,)
        return ()

    def fill(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        if node.start >= insertion.swa_start:
            self.store(node, self._offered(insertion, node.start, node.end), insertion)

    def overlap(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        """A tombstone gets data again, under the FULL indices it has; the window is refreshed."""
        if self.data(node).value is None and node.start >= insertion.swa_start:
            offered = self._offered(insertion, node.start, node.end)
            mine = node.component_data[ComponentType.FULL].value
            assert mine is not None
            theirs = insertion.indices(node.start, node.end)
            self.swa_allocator.move(theirs, mine, node.dp_rank)
            self.store(node, offered, insertion)
        elif node.end > len(insertion.key) - self.plan.window_tokens:
            self.policy.touch(self.data(node), insertion.now, hit=False)

    # -- locks and eviction --------------------------------------------------------------------

    def lock_from(self, node: UnifiedTreeNode) -> int:
        return self.plan.swa_evicted_seqlen(node.end)

    def acquire(self, node: UnifiedTreeNode) -> int:
        """Locks what is kept of a sequence that ends here.

        The grant is the depth where that begins. A node ends there (`lock_from`), and will for as
        long as the lock lives: a split moves no end, and with windows no node grows.
        """
        start = self.lock_from(node)
        for part in self.locked_by(node, start):
            self.lock_one(part)
        return start

    def release(self, node: UnifiedTreeNode, grant: object) -> None:
        for part in self.locked_by(node, grant):
            self.unlock_one(part)

    def locked_by(self, node: UnifiedTreeNode, grant: object) -> Iterable[UnifiedTreeNode]:
        assert isinstance(grant, int)
        return takewhile(lambda part: part.end > grant, node.path_to_root())

    def is_candidate(self, node: UnifiedTreeNode) -> bool:
        data = node.component_data[_SWA]
        return data.value is not None and data.lock_ref == 0

    # -- admission -----------------------------------------------------------------------------

    def demand(self, num_tokens: int, live: Sequence[RequestState]) -> int:
        """The tokens, or what all windows can grow by if that is less."""
        most = self.plan.request_owned_tokens
        growth = sum(max(most - _holding_of(state).num_owned, 0) for state in live)
        return min(self.allocator.page_ceil(num_tokens), most + growth)

    def demand_alone(self, num_tokens: int) -> int:
        return min(self.allocator.page_ceil(num_tokens), self.plan.request_tokens)

    def admit(self, state: RequestState, match: MatchResult) -> SWAHolding:
        return SWAHolding(state, self.swa_allocator, self.plan)

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
            yield from _holding_of(state).problems()
        for dp_rank in range(self.allocator.dp_size):
            full, here = self.swa_allocator.mapped_pages(dp_rank)
            free = np.isin(full, self.swa_allocator.full.free_pages(dp_rank))
            free |= np.isin(here, self.allocator.free_pages(dp_rank))
            if free.any() or len(np.unique(here)) < len(here):
                yield f"SWA on dp_rank {dp_rank}: mapped FULL pages {full} to {here}, some free"
