"""The plain caches built when ``enable_unified_radix_tree`` is off: small, and obviously right.

They take the same params and return the same results as `UnifiedRadixCache`, so that either can
stand in for the other; differential tests use them as oracles.
"""

from uhrc_core.baseline.chunk_cache import ChunkCache
from uhrc_core.baseline.radix_cache import RadixCache
from uhrc_core.baseline.swa_radix_cache import SWARadixCache

#: A window component frees what leaves the window in any cache, so one class serves both.
SWAChunkCache = ChunkCache

__all__ = ["ChunkCache", "RadixCache", "SWAChunkCache", "SWARadixCache"]
