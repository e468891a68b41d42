"""FullComponent: full attention (MHA, GQA, MLA) in the tree.

One pool index per token, shared read-only: a prefix is reusable wherever a node has a value, a
lock reaches the root, and only unlocked leaves can be evicted (so coverage from the root has no
gap).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from uhrc_core.plugin_api import (
    ComponentType,
    HostNeed,
    IndexArray,
    Insertion,
    InsertResult,
    MakeRoom,
    MatchResult,
    MatchValidator,
    MissReason,
    Offer,
    PagedIndexAllocator,
    RequestState,
    TokenHolding,
    TreeComponent,
    UnifiedTreeNode,
)

_FULL = ComponentType.FULL


def _has_value(node: UnifiedTreeNode, num_tokens: int) -> bool:
    return node.component_data[_FULL].value is not None


def _value_of(node: UnifiedTreeNode) -> IndexArray:
    value = node.component_data[_FULL].value
    assert value is not None
    return value


class FullComponent(TreeComponent):
    """Values are int32[len(edge)] KV token indices; see `TreeComponent` for the contract."""

    kind = _FULL
    miss_reason = MissReason.FULL_EVICTED

    def units_at(self, node: UnifiedTreeNode) -> int:
        return len(node.key)

    # -- matching and structure ----------------------------------------------------------------

    def match_validator(self) -> MatchValidator:
        return _has_value

    def refresh(self, path: Sequence[UnifiedTreeNode], now: int) -> None:
        touch = self.policy.touch
        for node in path:
            touch(node.component_data[_FULL], now, hit=True)

    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode) -> None:
        self.split_tokens(upper, lower)

    def fill(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        self.store(node, insertion.indices(node.start, node.end), insertion)

    def may_grow(self, node: UnifiedTreeNode, insertion: Insertion) -> bool:
        return True

    def grow(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        had = node.start + len(_value_of(node))
        self.append(node, insertion.indices(had, node.end), insertion)

    # -- locks and eviction --------------------------------------------------------------------

    def acquire(self, node: UnifiedTreeNode) -> object:
        """Locks the path to the root."""
        for part in node.path_to_root():
            self.lock_one(part)
        return True

    def release(self, node: UnifiedTreeNode, grant: object) -> None:
        for part in node.path_to_root():
            self.unlock_one(part)

    def locked_by(self, node: UnifiedTreeNode, grant: object) -> Iterable[UnifiedTreeNode]:
        return node.path_to_root()

    def is_candidate(self, node: UnifiedTreeNode) -> bool:
        data = node.component_data[_FULL]
        return data.value is not None and data.lock_ref == 0 and not node.children

    # -- requests and host tiers ---------------------------------------------------------------

    def admit(self, state: RequestState, match: MatchResult) -> FullHolding:
        return FullHolding(state, self.allocator, match.device_indices)

    def host_need(self, hit_len: int, full_len: int, stop: int) -> HostNeed:
        """The tokens that the device does not have."""
        start = min(full_len, stop)
        return HostNeed(_FULL, start, stop, stop - start)


class FullHolding(TokenHolding):
    """The pages of a request: the tree's up to ``protected_len``, its own from there on."""

    kind = _FULL

    def __init__(
        self, state: RequestState, allocator: PagedIndexAllocator, hit: IndexArray
    ) -> None:
        super().__init__(state, allocator)
        self.pages(0, len(hit))[:] = allocator.page_numbers(hit)

    # -- a step --------------------------------------------------------------------------------

    def extend(self, num_tokens: int) -> bool:
        state, start, page_size = self.state, self.state.allocated_len, self.page_size
        first, stop = self.new_pages(num_tokens)
        in_use = min(first * page_size, start + num_tokens)  # where the last page in use ends
        if first < stop:
            fresh = self.allocator.take_pages(stop - first, state.dp_rank)
            if fresh is None:
                return False
            self.pages(first * page_size, stop * page_size)[:] = fresh
            indices = self.allocator.indices_of(fresh)[: start + num_tokens - in_use]
            state.table.write(state.row, in_use, indices)
        if start < in_use:
            last = int(state.indices(start - 1, start)[0])
            state.table.write_range(state.row, start, last + 1, in_use - start)
        return True

    def undo_extend(self, num_tokens: int) -> None:
        first, stop = self.new_pages(num_tokens)
        self._give_up(first * self.page_size, stop * self.page_size)

    # -- publishing and the end ----------------------------------------------------------------

    def publishable_len(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.page_size

    def offer(self, seqlen: int, make_room: MakeRoom | None) -> Offer:
        return Offer(self.publishable_len(seqlen))

    def published(self, result: InsertResult) -> None:
        """Duplicates are freed; the row and the page table take the tree's indices there."""
        state = self.state
        start, stop = state.protected_len, result.prefix_len
        if stop <= start:
            return
        self._give_up(start, stop)
        for node in result.node.path_to_root():
            if node.end <= start:
                break
            value = _value_of(node)
            state.table.write(state.row, node.start, value)
            self.pages(node.start, node.end)[:] = self.allocator.page_numbers(value)

    def end(self) -> None:
        self._give_up(self.state.protected_len, self.state.allocated_len)

    def owned(self) -> IndexArray:
        state = self.state
        return state.indices(state.protected_len, state.allocated_len).copy()

    def _give_up(self, start: int, stop: int) -> None:
        self.allocator.give_up_pages(self.pages(start, stop), self.state.dp_rank)
