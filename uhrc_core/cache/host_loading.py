"""HostTierCache: what the tree does with a host tier: has it told, and brings its data back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from uhrc_core.arguments import count, integer
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.hicache import HiCache, host_needs
from uhrc_core.cache.host_tier import HiCacheHooks
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import full_indices
from uhrc_core.cache.params import CacheStats, InsertParams, MatchPrefixParams, MatchResult
from uhrc_core.cache.request import Request
from uhrc_core.cache.walk import Walk
from uhrc_core.errors import InvalidParamsError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType


class HostTierCache(BasePrefixCache):
    """The half of the tree that a host tier sees; `UnifiedRadixCache` is the other."""

    _stats: CacheStats

    @abstractmethod
    def _walk(self, key: RadixKey) -> Walk:
        """How far the key leads into the tree; changes nothing."""

    @abstractmethod
    def _use(self, walk: Walk, params: MatchPrefixParams) -> MatchResult:
        """The match that a walk found, marked as used."""

    def attach_hicache(
        self,
        hooks: HiCacheHooks,
        bytes_per_unit: Mapping[ComponentType, float | None] | None = None,
    ) -> None:
        """Have a host tier asked and told from here on; see `HiCacheHooks`.

        ``bytes_per_unit`` on the device, where known, for the sizes in its events.
        """
        sizes = bytes_per_unit or {}
        self.hicache = HiCache(hooks, self.components, self.page_size, sizes)

    def prefetch_req(self, req: Request, match: MatchResult) -> MatchResult:
        if not match.host_hit_length:
            return match
        key = self._key_for(req, match)
        priority, params = integer("priority", req.priority), self._reusable(key)
        stop = match.hit_len + count("host_hit_length", match.host_hit_length)
        if stop % self.page_size or stop > len(params.key):
            raise InvalidParamsError(
                f"match: a hit of {stop} tokens is not one of request {req.rid!r}; match it again"
            )
        walk = self._walk(params.key)
        hit = self._use(walk, params)
        # The hit and the FULL data beyond it stay, while room is made for the rest.
        locks = [self.inc_lock_ref(node) for node in (hit.best_match_node, *walk.path[-1:])]
        try:
            self._load(params.key.prefix(stop), walk, priority)
        finally:
            for lock in locks:
                self.dec_lock_ref(lock.node, lock.to_dec_params())
        better = self._use(self._walk(params.key), params)
        better.request, better.key = req, key
        return better

    def _load(self, key: RadixKey, walk: Walk, priority: int) -> None:
        """Take room for what the device lacks of ``key``, have it filled, insert it."""
        stop, dp_rank = len(key), key.dp_rank
        if stop <= walk.best_len:
            return
        needs = host_needs(self.components, walk.best_len, walk.full_len, stop)
        if needs is None or not self._make_room([need.num_units for need in needs], dp_rank):
            return
        held = min(walk.full_len, stop)
        value = full_indices([n for end in walk.path[-1:] for n in end.path_to_root()][::-1])[:held]
        taken: list[IndexArray] = []
        fields: dict[str, Any] = {"prev_prefix_len": held, "priority": priority}
        with ExitStack() as undo:
            for component, need in zip(self.components, needs, strict=True):
                indices = component.take_for_host(need, value, dp_rank)
                if indices is None:
                    return
                undo.callback(component.allocator.free, indices, dp_rank)
                taken.append(indices)
                fields |= component.host_fields(need, indices)
                if component.kind is ComponentType.FULL:
                    value = np.concatenate([value, indices])
            if not self.hicache.prefetch(key, needs, taken):
                return
            self.insert(InsertParams(key=key, value=value[held:], **fields))
            undo.pop_all()
        self._stats.prefetched_num_tokens += stop - walk.best_len
