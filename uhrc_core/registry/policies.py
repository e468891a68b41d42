"""The eviction policies that need no plugin, and their options."""

from __future__ import annotations

from pydantic import Field

from uhrc_core.cache.eviction import FIFO, LFU, LRU, SLRU, Priority
from uhrc_core.registry.specs import EvictionPolicySpec, NoOptions
from uhrc_core.registry.tables import ConfigTable


class SLRUOptions(ConfigTable):
    """Options of ``slru``."""

    protect_hits: int = Field(default=2, ge=1, description="Hits after which a node is protected.")


BUILTIN_POLICIES: tuple[EvictionPolicySpec, ...] = (
    EvictionPolicySpec("lru", NoOptions, lambda _: LRU()),
    EvictionPolicySpec("lfu", NoOptions, lambda _: LFU()),
    EvictionPolicySpec("slru", SLRUOptions, lambda options: SLRU(options.protect_hits)),
    EvictionPolicySpec("fifo", NoOptions, lambda _: FIFO()),
    EvictionPolicySpec("priority", NoOptions, lambda _: Priority()),
)
