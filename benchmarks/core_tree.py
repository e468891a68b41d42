"""The control plane against physical limits and against itself at another size.

python -m pytest benchmarks/core_tree.py
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from uhrc_core.baseline import ChunkCache
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import EvictParams, InsertParams, MatchPrefixParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.pools import PagedTokenToKVPoolAllocator
from uhrc_full.component import FullComponent

BestOf = Callable[[Callable[[], object], int], float]
CheckRatio = Callable[[str, float, float], None]


@dataclass(slots=True)
class Req:
    rid: str
    token_ids: np.ndarray
    extra_key: None = None
    dp_rank: int = 0
    priority: int = 0


def make_cache(
    num_tokens: int, page_size: int, kind: type[BasePrefixCache] = UnifiedRadixCache
) -> BasePrefixCache:
    pool = PagedTokenToKVPoolAllocator(num_tokens, page_size, 1)
    return kind(
        [FullComponent(pool, LRU(), eviction_priority=2)],
        page_size=page_size,
        max_requests=2,
        max_context_len=num_tokens,
    )


def publish(cache: BasePrefixCache, tokens: np.ndarray) -> None:
    value = cache.token_allocator.alloc(len(tokens))
    assert value is not None
    result = cache.insert(InsertParams(key=RadixKey(tokens), value=value))
    cache.token_allocator.free(value[: result.prefix_len])


@pytest.mark.parametrize(("num_edges", "limit"), [(1, 4.0), (16, 4.0), (512, 40.0)])
def test_match_against_one_compare_and_one_copy(
    num_edges: int, limit: float, best_of: BestOf, ratios: CheckRatio
) -> None:
    """A 131,072-token hit, page 128: one edge; a few turns; and one edge per 256-token chunk."""
    n = 131_072
    tokens = np.random.default_rng(0).integers(0, 150_000, n).astype(np.int32)
    cache = make_cache(n * 2, 128)
    for stop in np.linspace(0, n, num_edges + 1).astype(int)[1:]:
        publish(cache, tokens[:stop])
    params = MatchPrefixParams(key=RadixKey(tokens))
    assert cache.match_prefix(params).hit_len == n
    other = tokens.copy()
    floor = best_of(lambda: (tokens != other).argmax(), 200) + best_of(tokens.copy, 200)
    mine = best_of(lambda: cache.match_prefix(params), 200)
    ratios(f"match 131,072 tokens on {num_edges} edge(s) / compare + copy", mine / floor, limit)


@pytest.mark.parametrize("finished", [False, True])
def test_match_of_a_prompt_that_was_published_in_chunks(
    finished: bool, best_of: BestOf, ratios: CheckRatio
) -> None:
    """One request publishes 131,072 tokens in 512 chunks, page 128; others hit all of them while it
    runs and after it left."""
    n, chunk = 131_072, 256
    tokens = np.random.default_rng(0).integers(0, 150_000, n + 1).astype(np.int32)
    cache = make_cache(n * 2, 128)
    first = Req("first", tokens)
    assert cache.admit_req(first, cache.match_req(first), n) is not None
    for _ in range(0, n, chunk):
        assert cache.extend_req(first, chunk) is not None
        cache.advance_req(first, chunk)
        cache.cache_unfinished_req(first)
    if finished:
        cache.cache_finished_req(first)
    params = MatchPrefixParams(key=RadixKey(tokens[:n]))
    assert cache.match_prefix(params).hit_len == n
    indices, other = tokens[:n], tokens[:n].copy()
    floor = best_of(lambda: (indices != other).argmax(), 200) + best_of(indices.copy, 200)
    mine = best_of(lambda: cache.match_prefix(params), 200)
    state = "after it left" if finished else "while it runs"
    label = f"match 131,072 tokens that a request published in 512 chunks, {state}"
    ratios(f"{label} / compare + copy", mine / floor, 3.0)


def test_evicting_one_leaf_does_not_feel_the_number_of_leaves(ratios: CheckRatio) -> None:
    def one_eviction_s(num_leaves: int) -> float:
        cache = make_cache(1 << 19, 1)
        for leaf in range(num_leaves):
            publish(cache, np.array([leaf, 0], np.int32))
        one = EvictParams(num_tokens=1)
        gc.collect()
        times: list[float] = []
        for _ in range(1000):
            start = time.perf_counter()
            cache.evict(one)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    few, many = one_eviction_s(2_000), one_eviction_s(200_000)
    ratios("evict one of 200,000 leaves / one of 2,000", many / few, 3.0)


def test_insert_costs_its_suffix(best_of: BestOf, ratios: CheckRatio) -> None:
    """128 new tokens behind 131,072 known ones, against the memcmp that finds the known ones."""
    n, page = 131_072, 128
    tokens = np.random.default_rng(1).integers(0, 150_000, n + page).astype(np.int32)
    cache = make_cache(n * 2 + page, page)
    publish(cache, tokens[:n])
    value = cache.token_allocator.alloc(n + page)
    assert value is not None
    params = InsertParams(key=RadixKey(tokens), value=value)

    def insert_and_take_back() -> None:
        result = cache.insert(params)
        assert result.prefix_len == n
        cache.evict(EvictParams(num_tokens=page))
        again = cache.token_allocator.alloc(page)
        assert again is not None
        value[n:] = again

    left, right = params.key.data, tokens.copy().tobytes()
    floor = best_of(lambda: left == right, 200)
    ratios(
        "insert 128 tokens behind 131,072 / one memcmp of all",
        best_of(insert_and_take_back, 200) / floor,
        25.0,
    )


def test_a_workload_without_reuse_pays_little(ratios: CheckRatio) -> None:
    """Requests that share nothing: the tree's host work per token, against no cache at all."""

    rng = np.random.default_rng(2)
    prompts = rng.integers(0, 150_000, (40, 4096)).astype(np.int32)

    def serve(kind: type[BasePrefixCache]) -> float:
        cache = make_cache(1 << 15, 128, kind)
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            req = Req(str(number), prompt)
            match = cache.match_req(req)
            assert cache.admit_req(req, match, len(prompt)) is not None
            for _ in range(0, len(prompt), 512):
                assert cache.extend_req(req, 512) is not None
                cache.advance_req(req, 512)
                cache.cache_unfinished_req(req)
            cache.cache_finished_req(req)
        return time.perf_counter() - start

    tree = min(serve(UnifiedRadixCache) for _ in range(5))
    none = min(serve(ChunkCache) for _ in range(5))
    ratios("host work per request without reuse: tree / no cache", tree / none, 6.0)
