"""What the places where a host tier would be called cost without one, and with one that listens.

python -m pytest benchmarks/core_hicache.py
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.hicache import NO_HICACHE
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import EvictParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.pools import PagedTokenToKVPoolAllocator
from uhrc_full.component import FullComponent
from uhrc_hicache_stub.hooks import RecordingHooks

BestOf = Callable[[Callable[[], object], int], float]
CheckRatio = Callable[[str, float, float], None]

PAGE = 128


class Req:
    rid, extra_key, dp_rank, priority = "r", None, 0, 0

    def __init__(self, token_ids: np.ndarray) -> None:
        self.token_ids = token_ids


def make_cache() -> UnifiedRadixCache:
    pool = PagedTokenToKVPoolAllocator(64 * PAGE, PAGE, 1)
    return UnifiedRadixCache(
        [FullComponent(pool, LRU(), eviction_priority=2)],
        page_size=PAGE,
        max_requests=2,
        max_context_len=64 * PAGE,
    )


def life(cache: UnifiedRadixCache, tokens: np.ndarray) -> Callable[[], None]:
    """A request that matches, computes, publishes, leaves, and whose tokens are evicted."""
    req = Req(tokens)
    evict = EvictParams(num_tokens=len(tokens))

    def run() -> None:
        match = cache.prefetch_req(req, cache.match_req(req))
        assert cache.admit_req(req, match, len(tokens)) is not None
        cache.extend_req(req, len(tokens))
        cache.advance_req(req, len(tokens))
        cache.cache_finished_req(req)
        cache.evict(evict)

    return run


def test_no_host_tier_costs_a_request_next_to_nothing(best_of: BestOf, ratios: CheckRatio) -> None:
    """The calls of the null object, against all the cache does for a request of one page."""
    cache = make_cache()
    tokens = np.arange(PAGE, dtype=np.int32)
    req, key, node = Req(tokens), RadixKey(tokens), UnifiedTreeNode(1, RadixKey([]), None, 0, 0)
    match = cache.match_req(req)

    def null_calls() -> None:
        NO_HICACHE.lookup(key, 0, 0)
        cache.prefetch_req(req, match)
        NO_HICACHE.write_through(node)
        NO_HICACHE.write_back(node, cache.components)

    percent = 100 * best_of(null_calls, 2000) / best_of(life(cache, tokens), 2000)
    ratios("calls of no host tier, percent of a request's life", percent, 2.0)


def test_a_tier_that_listens_costs_a_fraction(best_of: BestOf, ratios: CheckRatio) -> None:
    """The stub is told of every request and every eviction: events made, checked, counted."""
    tokens = np.arange(32 * PAGE, dtype=np.int32)
    quiet, told = make_cache(), make_cache()
    told.attach_hicache(RecordingHooks())
    ratio = best_of(life(told, tokens), 1000) / best_of(life(quiet, tokens), 1000)
    ratios("a request's life with the stub / without", ratio, 2.0)
