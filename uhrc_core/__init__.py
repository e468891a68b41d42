"""Unified Hybrid Radix Cache: one prefix cache for full and recurrent attention.

import uhrc_core as uhrc

cache = uhrc.build_kv_cache(page_size=16, full_tokens=4096)
match = cache.match_prefix(uhrc.MatchPrefixParams(key=uhrc.RadixKey([1, 2, 3])))
"""

from uhrc_core.assemble import build_kv_cache, make_device_pools
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.events import CacheEvent, EventKind
from uhrc_core.cache.holding import RequestState, StateSlots
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import (
    CacheStats,
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    MissReason,
)
from uhrc_core.cache.request import Request
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.config.by_hand import CacheOptions
from uhrc_core.config.config import Config
from uhrc_core.config.loading import load_config, parse_config
from uhrc_core.config.resolve import resolve
from uhrc_core.config.resolved import ResolvedConfig
from uhrc_core.errors import (
    CacheError,
    ConfigError,
    InvalidIndexError,
    InvalidKeyError,
    InvalidParamsError,
    InvariantError,
    PluginError,
    ReceiptError,
    RequestError,
    RequestTooLargeError,
    StaleNodeError,
    UHRCError,
)
from uhrc_core.kinds import ComponentType

__version__ = "0.1.0"

__all__ = [
    "BasePrefixCache",
    "CacheError",
    "CacheEvent",
    "CacheOptions",
    "CacheStats",
    "ComponentType",
    "Config",
    "ConfigError",
    "DecLockRefParams",
    "EventKind",
    "EvictParams",
    "EvictResult",
    "IncLockRefResult",
    "InsertParams",
    "InsertResult",
    "InvalidIndexError",
    "InvalidKeyError",
    "InvalidParamsError",
    "InvariantError",
    "MatchPrefixParams",
    "MatchResult",
    "MissReason",
    "PluginError",
    "RadixKey",
    "ReceiptError",
    "Request",
    "RequestError",
    "RequestState",
    "RequestTooLargeError",
    "ResolvedConfig",
    "StaleNodeError",
    "StateSlots",
    "UHRCError",
    "UnifiedRadixCache",
    "build_kv_cache",
    "load_config",
    "make_device_pools",
    "parse_config",
    "resolve",
]
