"""Reclaimed: what one eviction takes from the tree; gathered first, freed all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import EvictResult
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType


class Reclaimed:
    """Values that left the tree and are not free yet, of one dp rank.

    Attributes:
        counts: units by `ComponentType`.
    """

    def __init__(self, components: Sequence[TreeComponent], dp_rank: int) -> None:
        self.counts = [0] * len(ComponentType)
        self._dp_rank = dp_rank
        self._values: list[tuple[TreeComponent, list[IndexArray]]] = [(c, []) for c in components]

    def take(self, node: UnifiedTreeNode, victims: Sequence[TreeComponent]) -> None:
        """Drop what ``victims`` have at ``node``."""
        for component, values in self._values:
            value = component.drop(node) if component in victims else None
            if value is not None:
                values.append(value)
                self.counts[component.kind] += len(value)
        for component, _ in self._values:
            component.rank_changed(node)

    def free(self) -> EvictResult:
        """Give all of it back to the pools; what was dropped last is the first to go out again."""
        for component, values in self._values:
            if values:
                component.allocator.reclaim(np.concatenate(values[::-1]), self._dp_rank)
        return EvictResult(*self.counts)
