"""MakesRoom: whether the pools can cover a need, and evicting until they do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.holding import Holding
from uhrc_core.cache.params import EvictParams, EvictResult


class MakesRoom(ABC):
    """Needs are in units of each component, in the cache's order of components."""

    components: Sequence[TreeComponent]

    @abstractmethod
    def evict(self, params: EvictParams) -> EvictResult:
        """Reclaim what is not locked, and say how much of each component, cascades included."""

    def _make_room_for(self, holding: Holding, dp_rank: int, num_units: int) -> bool:
        """Evict until one component has so many units free."""
        needs = [num_units * (part.kind is holding.kind) for part in self.components]
        return self._make_room(needs, dp_rank)

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
