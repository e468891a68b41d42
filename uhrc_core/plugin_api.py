"""Everything that the author of a plugin needs, of whatever kind; import it from here alone.

The tests of a plugin take `uhrc_core.testing` beside it. What a name is for stands where it is
defined; where modules lie inside the core may change, the names here do not.
"""

from uhrc_core.cache.component import HostNeed, MatchValidator, StateSlots, TreeComponent
from uhrc_core.cache.eviction import FIFO, LFU, LRU, SLRU, EvictionPolicy, Priority, Rank
from uhrc_core.cache.holding import RequestState
from uhrc_core.cache.host_tier import (
    DeviceSpan,
    HiCacheComponent,
    HiCacheContext,
    HiCacheEvent,
    HiCacheHooks,
    HostQuery,
    PrefetchEvent,
    WriteBackEvent,
    WriteThroughEvent,
)
from uhrc_core.cache.key import Namespace, RadixKey
from uhrc_core.cache.node import ComponentData, UnifiedTreeNode
from uhrc_core.cache.params import (
    EvictParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    MissReason,
)
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.config.config import Config
from uhrc_core.errors import (
    CacheError,
    ConfigError,
    InvalidIndexError,
    InvalidKeyError,
    InvalidParamsError,
    PluginError,
    RequestError,
    StaleNodeError,
    UHRCError,
)
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import (
    HybridReqToTokenPool,
    PagedIndexAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from uhrc_core.registry.hf_config import (
    full_attention_layer,
    layer_types_of,
    linear_layers_of,
    num_layers_of,
    size_of,
    text_config,
    window_layers_of,
)
from uhrc_core.registry.hookspecs import UHRC_API, hookimpl
from uhrc_core.registry.kernels import Kernel
from uhrc_core.registry.plan import BufferPlan, LayerKind, PoolPlan
from uhrc_core.registry.recurrent import (
    ITEM_BYTES,
    MODEL_DTYPE,
    BufferShape,
    RecurrentBackendSpec,
    RecurrentModel,
    StateLayout,
    conv_buffers,
    hybrid_layers,
)
from uhrc_core.registry.rules import EXTRA_BUFFER, ONE_BACKEND, TRACK_ON_PAGES, Rule, rule
from uhrc_core.registry.specs import (
    CliCommandSpec,
    ComponentContext,
    ComponentParams,
    ComponentSpec,
    ConfigTableSpec,
    EvictionPolicySpec,
    HiCacheParams,
    HiCacheSpec,
    NoOptions,
    RestOfConfig,
)
from uhrc_core.registry.tables import (
    INDEX_MAX,
    CacheConfig,
    ConfigPath,
    ConfigTable,
    PositiveInt,
    SchedulerConfig,
)

__all__ = [
    "EXTRA_BUFFER",
    "FIFO",
    "INDEX_MAX",
    "ITEM_BYTES",
    "LFU",
    "LRU",
    "MODEL_DTYPE",
    "ONE_BACKEND",
    "SLRU",
    "TRACK_ON_PAGES",
    "UHRC_API",
    "BufferPlan",
    "BufferShape",
    "CacheConfig",
    "CacheError",
    "CliCommandSpec",
    "ComponentContext",
    "ComponentData",
    "ComponentParams",
    "ComponentSpec",
    "ComponentType",
    "Config",
    "ConfigError",
    "ConfigPath",
    "ConfigTable",
    "ConfigTableSpec",
    "DeviceSpan",
    "EvictParams",
    "EvictionPolicy",
    "EvictionPolicySpec",
    "HiCacheComponent",
    "HiCacheContext",
    "HiCacheEvent",
    "HiCacheHooks",
    "HiCacheParams",
    "HiCacheSpec",
    "HostNeed",
    "HostQuery",
    "HybridReqToTokenPool",
    "IndexArray",
    "InsertParams",
    "InsertResult",
    "InvalidIndexError",
    "InvalidKeyError",
    "InvalidParamsError",
    "Kernel",
    "LayerKind",
    "MatchPrefixParams",
    "MatchResult",
    "MatchValidator",
    "MissReason",
    "Namespace",
    "NoOptions",
    "PagedIndexAllocator",
    "PagedTokenToKVPoolAllocator",
    "PluginError",
    "PoolPlan",
    "PositiveInt",
    "PrefetchEvent",
    "Priority",
    "RadixKey",
    "Rank",
    "RecurrentBackendSpec",
    "RecurrentModel",
    "RequestError",
    "RequestState",
    "RestOfConfig",
    "Rule",
    "SWATokenToKVPoolAllocator",
    "SchedulerConfig",
    "StaleNodeError",
    "StateLayout",
    "StateSlots",
    "TokenToKVPoolAllocator",
    "TreeComponent",
    "UHRCError",
    "UnifiedRadixCache",
    "UnifiedTreeNode",
    "WriteBackEvent",
    "WriteThroughEvent",
    "conv_buffers",
    "full_attention_layer",
    "hookimpl",
    "hybrid_layers",
    "layer_types_of",
    "linear_layers_of",
    "num_layers_of",
    "rule",
    "size_of",
    "text_config",
    "window_layers_of",
]
