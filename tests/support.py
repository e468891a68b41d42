"""Builders shared by the tests: small caches, keys made of recognisable pages, plain requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.eviction import LRU, EvictionPolicy
from uhrc_core.cache.key import ExtraKey, RadixKey
from uhrc_core.cache.params import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.indices import IndexArray
from uhrc_core.pools import PagedTokenToKVPoolAllocator
from uhrc_full.component import FullComponent


def full_cache(
    num_pages: int = 16,
    page_size: int = 1,
    *,
    dp_size: int = 1,
    max_requests: int = 4,
    policy: EvictionPolicy | None = None,
) -> UnifiedRadixCache:
    """A FULL cache of ``num_pages`` pages per rank."""
    pool = PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, dp_size)
    return UnifiedRadixCache(
        [FullComponent(pool, policy or LRU(), eviction_priority=2)],
        page_size=page_size,
        dp_size=dp_size,
        max_requests=max_requests,
        max_context_len=max(num_pages * page_size, 8),
    )


def paged_tokens(pages: list[int], page_size: int, tail: int = 0) -> list[int]:
    """Tokens of whole pages named by small numbers, and ``tail`` tokens of one more."""
    tokens = [page * 1000 + offset for page in pages for offset in range(page_size)]
    return tokens + [999_000 + offset for offset in range(tail)]


def insert(cache: BasePrefixCache, tokens: list[int], extra_key: ExtraKey = None) -> InsertResult:
    """Allocate and insert; gives back what the tree did not take."""
    key = RadixKey(tokens, extra_key)
    value = cache.token_allocator.alloc(len(tokens))
    assert value is not None, "the test's pool is too small"
    result = cache.insert(InsertParams(key=key, value=value))
    cache.token_allocator.free(value[: result.prefix_len])
    cache.token_allocator.free(value[result.inserted_len :])
    return result


def match(cache: BasePrefixCache, tokens: list[int], extra_key: ExtraKey = None) -> MatchResult:
    return cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, extra_key)))


@dataclass
class PlainRequest:
    """The least an engine's request must have."""

    rid: str
    token_ids: list[int]
    extra_key: ExtraKey = None
    dp_rank: int = 0
    priority: int = 0
    seen: list[IndexArray] = field(default_factory=list)


def run_tokens(cache: BasePrefixCache, req: PlainRequest, upto: int) -> bool:
    """Compute the request's tokens up to ``upto``; ``False`` when the pool is short."""
    todo = upto - cache.request_state(req.rid).allocated_len
    indices = cache.extend_req(req, todo)
    if indices is None:
        return False
    req.seen.append(np.array(indices))
    cache.advance_req(req, todo)
    return True


def admit(cache: BasePrefixCache, req: PlainRequest) -> int | None:
    """Match and admit; the hit length, or ``None`` when it must wait."""
    match = cache.match_req(req)
    state = cache.admit_req(req, match, num_tokens=len(req.token_ids) - match.hit_len)
    return None if state is None else state.cached_len
