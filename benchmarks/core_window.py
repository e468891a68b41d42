"""The control plane of (FULL, SWA): what windows cost where nothing is shared, and where much is.

python -m pytest benchmarks/core_window.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from uhrc_core.baseline import ChunkCache
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.params import EvictParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.pools import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from uhrc_full.component import FullComponent
from uhrc_swa.component import SWAComponent
from uhrc_swa.window import WindowPlan

PAGE, WINDOW, CHUNK = 16, 128, 512
BestOf = Callable[[Callable[[], object], int], float]
CheckRatio = Callable[[str, float, float], None]


@dataclass
class Req:
    rid: str
    token_ids: npt.NDArray[np.int32]
    extra_key: None = None
    dp_rank: int = 0
    priority: int = 0


def make_cache(
    windows: bool, kind: type[BasePrefixCache] = UnifiedRadixCache, swa_tokens: int = 1 << 14
) -> BasePrefixCache:
    num_tokens = 1 << 17
    tokens = PagedTokenToKVPoolAllocator(num_tokens, PAGE, 1)
    components: list[TreeComponent] = [FullComponent(tokens, LRU(), 2)]
    if windows:
        pool = SWATokenToKVPoolAllocator(swa_tokens, tokens, WINDOW)
        components.append(SWAComponent(pool, LRU(), 1, WindowPlan(WINDOW, CHUNK, PAGE)))
    return kind(components, page_size=PAGE, max_requests=2, max_context_len=num_tokens)


def serve(cache: BasePrefixCache, prompts: npt.NDArray[np.int32], decode: int) -> float:
    """Seconds of host work per request: prefill in chunks, then tokens one by one."""
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        req = Req(str(number), prompt)
        match = cache.match_req(req)
        assert cache.admit_req(req, match, len(prompt) - match.hit_len) is not None
        for begin in range(match.hit_len, len(prompt) - decode, CHUNK):
            step = min(CHUNK, len(prompt) - decode - begin)
            assert cache.extend_req(req, step) is not None
            cache.advance_req(req, step)
            cache.cache_unfinished_req(req)
        for _ in range(decode):
            assert cache.extend_req(req, 1) is not None
            cache.advance_req(req, 1)
        cache.cache_finished_req(req)
    return (time.perf_counter() - start) / len(prompts)


def test_windows_without_reuse_cost_little(ratios: CheckRatio) -> None:
    """Requests that share nothing, 4,096 tokens and 256 decoded: the tree against no sharing, and
    windows against full attention alone."""
    prompts = np.random.default_rng(0).integers(0, 150_000, (12, 4096 + 256)).astype(np.int32)

    def best(windows: bool, kind: type[BasePrefixCache]) -> float:
        return min(serve(make_cache(windows, kind), prompts, 256) for _ in range(5))

    tree, none = best(True, UnifiedRadixCache), best(True, ChunkCache)
    full = best(False, UnifiedRadixCache)
    ratios("host work per request without reuse, windows: tree / no sharing", tree / none, 2.0)
    ratios("host work per request without reuse: windows / full attention alone", tree / full, 4.0)


def test_a_hit_behind_many_tombstones_costs_its_compare(
    best_of: BestOf, ratios: CheckRatio
) -> None:
    """A 65,536-token prompt published in chunks whose old windows are gone.

    Full attention alone keeps it in a few nodes, since a request's leaf grows; where there are
    windows each chunk leaves two nodes, so what a match costs is also told beside its floor.
    """
    prompt = np.random.default_rng(1).integers(0, 150_000, 65_536 + 1).astype(np.int32)
    times: list[float] = []
    for windows in (True, False):
        cache = make_cache(windows)
        serve(cache, prompt[None], 1)
        if windows:
            cache.evict(EvictParams(swa_num_tokens=8192))
        req = Req("again", prompt)
        assert cache.match_req(req).hit_len == 65_536
        times.append(best_of(lambda cache=cache, req=req: cache.match_req(req), 100))
    other = prompt.copy()
    floor = best_of(lambda: (prompt != other).argmax(), 100) + best_of(prompt.copy, 100)
    ratios("match 65,536 tokens in chunks: windows / compare + copy", times[0] / floor, 40.0)
    ratios("match 65,536 tokens in chunks: full alone / compare + copy", times[1] / floor, 6.0)
