"""FullComponent: full attention (MHA, GQA, MLA) in the tree.

One pool index per token, shared read-only: a prefix is reusable wherever a node has a value, a
lock reaches the root, and only unlocked leaves can be evicted (so coverage from the root has no
gap).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from uhrc_core.plugin_api import (
    ComponentType,
    HostNeed,
    IndexArray,
    InsertParams,
    InsertResult,
    MatchValidator,
    MissReason,
    RequestState,
    TreeComponent,
    UnifiedTreeNode,
)

_FULL = ComponentType.FULL


def _has_value(node: UnifiedTreeNode, num_tokens: int) -> bool:
    return node.component_data[_FULL].value is not None


class FullComponent(TreeComponent):
    """Values are int32[len(edge)] KV token indices; see `TreeComponent` for the contract."""

    kind = ComponentType.FULL
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

    def fill(self, node: UnifiedTreeNode, params: InsertParams, now: int) -> None:
        self.store(node, params.value[node.start : node.end], now)

    # -- locks and eviction --------------------------------------------------------------------

    def acquire(self, node: UnifiedTreeNode) -> object:
        """Locks the path to the root."""
        for part in node.path_to_root():
            self.lock_one(part)
        return True

    def release(self, node: UnifiedTreeNode, token: object) -> None:
        for part in node.path_to_root():
            self.unlock_one(part)

    def locked_by(self, node: UnifiedTreeNode, token: object) -> Iterable[UnifiedTreeNode]:
        return node.path_to_root()

    def is_candidate(self, node: UnifiedTreeNode) -> bool:
        data = node.component_data[_FULL]
        return data.value is not None and data.lock_ref == 0 and not node.children

    # -- life of a request ---------------------------------------------------------------------

    def token_indices(self, state: RequestState, stop: int) -> IndexArray:
        return state.indices(0, stop)

    def extend(self, state: RequestState, num_tokens: int) -> bool:
        start = state.allocated_len
        last = int(state.indices(start - 1, start)[0]) if start else -1
        indices = self.allocator.extend(start, last, num_tokens, state.dp_rank)
        if indices is None:
            return False
        state.table.write(state.row, start, indices)
        self.allocator.claim(self._fresh(state, num_tokens), state.dp_rank)
        return True

    def undo_extend(self, state: RequestState, num_tokens: int) -> None:
        self._give_up(state, self._fresh(state, num_tokens))

    def offer(self, state: RequestState, seqlen: int) -> Mapping[str, Any]:
        self.allocator.unclaim(state.indices(state.protected_len, seqlen), state.dp_rank)
        return {}

    def settle(self, state: RequestState, result: InsertResult) -> None:
        """Duplicates of what the tree already had are freed; the row takes the tree's indices."""
        start, stop = state.protected_len, result.prefix_len
        if stop <= start:
            return
        self.allocator.free(state.indices(start, stop), state.dp_rank)
        for node in result.node.path_to_root():
            if node.end <= start:
                break
            value = node.component_data[_FULL].value
            assert value is not None
            state.table.write(state.row, node.start, value)

    def end(self, state: RequestState) -> None:
        self._give_up(state, self.held_by(state))

    def held_by(self, state: RequestState) -> IndexArray:
        return np.array(state.indices(state.protected_len, state.allocated_len))

    def host_need(self, hit_len: int, full_len: int, stop: int) -> HostNeed:
        """The tokens that the device does not have."""
        start = min(full_len, stop)
        return HostNeed(_FULL, start, stop, stop - start)

    def _fresh(self, state: RequestState, num_tokens: int) -> IndexArray:
        """Indices of the pages that ``num_tokens`` more tokens take beyond the last page in use."""
        stop = state.allocated_len + num_tokens
        start = min(self.allocator.page_ceil(state.allocated_len), stop)
        return state.indices(start, stop)

    def _give_up(self, state: RequestState, indices: IndexArray) -> None:
        self.allocator.unclaim(indices, state.dp_rank)
        self.allocator.free(indices, state.dp_rank)
