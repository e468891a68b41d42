"""The flag-off caches: `RadixCache` answers as the unified tree does; `ChunkCache` never shares."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import PlainRequest, admit, full_cache, insert, paged_tokens, run_tokens
from uhrc_core.baseline import ChunkCache, RadixCache
from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import (
    EvictParams,
    IncLockRefResult,
    InsertParams,
    MatchPrefixParams,
    MissReason,
)
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.errors import InvalidIndexError, InvalidParamsError, ReceiptError, StaleNodeError
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedTokenToKVPoolAllocator
from uhrc_core.testing import contents
from uhrc_full.component import FullComponent

FULL = ComponentType.FULL


def plain_cache(
    kind: type[RadixCache], num_pages: int = 16, page_size: int = 1, dp_size: int = 1
) -> RadixCache:
    pool = PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, dp_size)
    return kind(
        [FullComponent(pool, LRU(), eviction_priority=2)],
        page_size=page_size,
        dp_size=dp_size,
        max_requests=4,
        max_context_len=num_pages * page_size,
    )


class Player:
    """Plays one random program on one cache; equal seeds play equal programs."""

    def __init__(self, cache: RadixCache | UnifiedRadixCache, seed: int) -> None:
        self.cache = cache
        self.rng = np.random.default_rng(seed)
        self.locks: list[IncLockRefResult] = []
        self.live: list[PlainRequest] = []
        self.serial = 0

    def step(self) -> object:
        """One action; its answer must not depend on the cache."""
        rng, page_size, dp_size = self.rng, self.cache.page_size, self.cache.dp_size
        pages = rng.integers(0, 2, int(rng.integers(1, 6))).tolist()
        tokens = paged_tokens(pages, page_size, int(rng.integers(0, page_size)))
        space = ("s", int(rng.integers(2)))
        key = RadixKey(tokens, space, int(rng.integers(dp_size)))
        name = ["match", "insert", "evict", "peek", "lock", "unlock", "arrive", "run", "leave"]
        return getattr(self, name[int(rng.integers(len(name)))])(key)

    def match(self, key: RadixKey) -> object:
        result = self.cache.match_prefix(MatchPrefixParams(key=key))
        return (result.device_indices.tolist(), result.full_hit_length)

    def peek(self, key: RadixKey) -> object:
        return self.cache.peek_prefix_len(key)

    def insert(self, key: RadixKey) -> object:
        pool = self.cache.token_allocator
        value = pool.alloc(len(key), key.dp_rank)
        if value is None:
            return None
        done = self.cache.insert(InsertParams(key=key, value=value))
        pool.free(value[: done.prefix_len], key.dp_rank)
        pool.free(value[done.inserted_len :], key.dp_rank)
        return (done.prefix_len, done.inserted_len)

    def evict(self, key: RadixKey) -> object:
        return self.cache.evict(EvictParams(num_tokens=len(key) // 2, dp_rank=key.dp_rank))

    def lock(self, key: RadixKey) -> object:
        node = self.cache.match_prefix(MatchPrefixParams(key=key)).best_match_node
        self.locks.append(self.cache.inc_lock_ref(node))
        return node.end

    def unlock(self, key: RadixKey) -> object:
        if self.locks:
            lock = self.locks.pop(0)
            self.cache.dec_lock_ref(lock.node, lock.to_dec_params())
        return len(self.locks)

    def arrive(self, key: RadixKey) -> object:
        self.serial += 1
        req = PlainRequest(str(self.serial), key.tokens.tolist(), key.extra_key, key.dp_rank)
        hit = admit(self.cache, req)
        if hit is not None:
            self.live.append(req)
        return hit

    def run(self, key: RadixKey) -> object:
        for req in self.live:
            if run_tokens(self.cache, req, len(req.token_ids)):
                self.cache.cache_unfinished_req(req)
        return [self.cache.request_state(req.rid).protected_len for req in self.live]

    def leave(self, key: RadixKey) -> object:
        if self.live:
            self.cache.cache_finished_req(self.live.pop(0), is_insert=len(key) % 3 > 0)
        return len(self.live)


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_radix_cache_and_unified_tree_give_the_same_answers(
    page_size: int, dp_size: int, seed: int
) -> None:
    """Same hits, same indices, same frees and the same victims, step by step."""
    players = [
        Player(plain_cache(RadixCache, 14, page_size, dp_size), seed),
        Player(full_cache(14, page_size, dp_size=dp_size), seed),
    ]
    for step in range(250):
        off, on = (player.step() for player in players)
        assert off == on, f"seed {seed}, step {step}"
        assert contents(players[0].cache) == contents(players[1].cache), f"seed {seed}, {step}"
        for player in players:
            player.cache.check_invariants()
    off, on = (player.cache.stats() for player in players)
    assert (off.hit_num_tokens, off.evicted) == (on.hit_num_tokens, on.evicted)
    assert on.hit_num_tokens > 0 and on.evicted.num_tokens_evicted > 0


def test_chunk_cache_never_shares_and_never_keeps() -> None:
    cache = plain_cache(ChunkCache, page_size=2)
    for turn in range(2):
        req = PlainRequest(str(turn), [1, 2, 3, 4, 5])
        assert admit(cache, req) == 0
        assert run_tokens(cache, req, 3) and run_tokens(cache, req, 5)
        cache.cache_unfinished_req(req)
        assert len(np.concatenate(req.seen)) == 5
        cache.check_invariants()
        cache.cache_finished_req(req)
        assert cache.available_size(FULL) == 32
    assert cache.peek_prefix_len(RadixKey([1, 2, 3, 4])) == 0
    stats = cache.stats()
    assert stats.miss_reasons[MissReason.DISABLED] == 2
    assert (stats.query_num_tokens, stats.hit_num_tokens) == (8, 0)


@pytest.mark.parametrize("cache", [plain_cache(RadixCache), full_cache()])
def test_bad_input_gets_the_same_errors_as_from_the_unified_tree(
    cache: RadixCache | UnifiedRadixCache,
) -> None:
    node = insert(cache, [1, 2, 3]).node
    key, before = RadixKey([1, 2, 3, 4]), cache.digest()
    free, taken = np.arange(12, 16, dtype=np.int32), np.zeros(4, np.int32)
    unknown = IncLockRefResult(5, node).to_dec_params()
    stranger = insert(full_cache(), [1]).node
    for error, call in (
        (InvalidIndexError, lambda: cache.insert(InsertParams(key=key, value=free))),
        (InvalidIndexError, lambda: cache.insert(InsertParams(key=key, value=taken))),
        (InvalidParamsError, lambda: cache.insert(InsertParams(key=key, value=free[:2]))),
        (
            InvalidParamsError,
            lambda: cache.insert(InsertParams(key=key, value=free, prev_prefix_len=4)),
        ),
        (InvalidParamsError, lambda: cache.peek_prefix_len(RadixKey([1], None, 1))),
        (InvalidParamsError, lambda: cache.evict(EvictParams(recurrent_num=1))),
        (InvalidParamsError, lambda: cache.evictable_size(ComponentType.SWA)),
        (StaleNodeError, lambda: cache.inc_lock_ref(stranger)),
        (ReceiptError, lambda: cache.dec_lock_ref(node, unknown)),
    ):
        with pytest.raises(error):
            call()
    assert cache.digest() == before
    cache.check_invariants()
