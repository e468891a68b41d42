"""Host-side bookkeeping of device pools: which index is whose. No device memory here."""

from uhrc_core.pools.allocator import (
    PagedIndexAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from uhrc_core.pools.hybrid import HybridReqToTokenPool
from uhrc_core.pools.req_to_token import ReqToTokenPool
from uhrc_core.pools.swa import SWATokenToKVPoolAllocator

__all__ = [
    "HybridReqToTokenPool",
    "PagedIndexAllocator",
    "PagedTokenToKVPoolAllocator",
    "ReqToTokenPool",
    "SWATokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
]
