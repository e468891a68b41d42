"""A window model on paper: each place in a pool holds a hash of the sequence up to its token.

It drives requests through a (FULL, SWA) cache as an engine would, and checks at every forward that
each token a window reaches is there, under the index the cache names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from tests.support import PlainRequest
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import EvictParams, EvictResult, InsertParams, InsertResult, MatchResult
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from uhrc_full.component import FullComponent
from uhrc_swa.component import SWAComponent
from uhrc_swa.window import WindowPlan

FULL, SWA = ComponentType.FULL, ComponentType.SWA


@dataclass(frozen=True)
class Sizes:
    """Pools in pages, the rest in tokens."""

    full_pages: int = 64
    swa_pages: int = 64
    page_size: int = 1
    window: int = 4
    extend: int = 8
    dp_size: int = 1
    max_requests: int = 4


def window_cache(
    sizes: Sizes, cache_class: type[BasePrefixCache] = UnifiedRadixCache
) -> BasePrefixCache:
    """(FULL, SWA)."""
    page_size, dp_size = sizes.page_size, sizes.dp_size
    tokens = PagedTokenToKVPoolAllocator(sizes.full_pages * page_size, page_size, dp_size)
    windows = SWATokenToKVPoolAllocator(sizes.swa_pages * page_size, tokens, sizes.window)
    plan = WindowPlan(sizes.window, sizes.extend, page_size)
    return cache_class(
        [FullComponent(tokens, LRU(), 2), SWAComponent(windows, LRU(), 1, plan)],
        page_size=page_size,
        dp_size=dp_size,
        max_requests=sizes.max_requests,
        max_context_len=sizes.full_pages * page_size,
    )


def swa_of(cache: BasePrefixCache) -> SWAComponent:
    component = cache.components[1]
    assert isinstance(component, SWAComponent)
    return component


def take(cache: BasePrefixCache, num_tokens: int, evicted: int = 0) -> list[int]:
    """FULL indices in whole pages, with SWA indices from token ``evicted`` on."""
    value = cache.token_allocator.alloc(num_tokens)
    assert value is not None, "the test's FULL pool is too small"
    assert swa_of(cache).swa_allocator.alloc_for(value[evicted:]) is not None, "SWA pool too small"
    return value.tolist()


def insert(
    cache: BasePrefixCache, tokens: list[int], evicted: int = 0, held: int = 0
) -> InsertResult:
    """Insert tokens with SWA data from ``evicted`` on, and give back what the tree did not take.

    ``held``: tokens of the prefix that the caller has from the tree, locked.
    """
    value = take(cache, len(tokens) - held, max(evicted - held, 0))
    params = InsertParams(
        key=RadixKey(tokens), value=value, prev_prefix_len=held, swa_evicted_seqlen=evicted
    )
    result = cache.insert(params)
    swa, full = swa_of(cache).swa_allocator, cache.token_allocator
    double, rest = result.prefix_len - held, result.inserted_len - held
    for part in (params.value[:double], params.value[rest:]):
        swa.free_for(part)
        full.free(part)
    return result


def evict_swa(cache: BasePrefixCache, num_tokens: int) -> EvictResult:
    return cache.evict(EvictParams(swa_num_tokens=num_tokens))


def spans(cache: BasePrefixCache) -> list[tuple[int, int, bool]]:
    """(start, end, whether it has SWA data) of every node, by depth; for trees of one branch."""
    nodes = sorted(cache.nodes()[1:], key=lambda node: node.start)
    return [(node.start, node.end, node.component_data[SWA].value is not None) for node in nodes]


def node_ending(cache: BasePrefixCache, end: int) -> UnifiedTreeNode:
    """The one node that ends at a depth."""
    (node,) = [node for node in cache.nodes() if node.end == end]
    return node


@dataclass
class WindowDevice:
    """What the pools hold per dp rank, and the engine's side of a request's life."""

    cache: BasePrefixCache
    full: dict[tuple[int, int], int] = field(default_factory=dict)
    swa: dict[tuple[int, int], int] = field(default_factory=dict)
    #: most SWA tokens that live requests owned at once
    peak_owned: int = 0

    @property
    def window(self) -> int:
        return swa_of(self.cache).plan.window_tokens

    def admit(self, req: PlainRequest, num_tokens: int | None = None) -> MatchResult | None:
        """Match and admit; ``None``: it must wait."""
        found = self.cache.match_req(req)
        need = len(req.token_ids) - found.hit_len if num_tokens is None else num_tokens
        return found if self.cache.admit_req(req, found, num_tokens=need) else None

    def forward(self, req: PlainRequest, stop: int) -> bool:
        """One forward up to ``stop`` tokens; ``False``: a pool is short."""
        state, rank = self.cache.request_state(req.rid), req.dp_rank
        start = state.computed_len
        if self.cache.extend_req(req, stop - state.allocated_len) is None:
            return False
        places = self.cache.token_indices(req, stop)
        full, swa = places[FULL].tolist(), places[SWA].tolist()
        seen = states(req.token_ids[:stop])
        for position in range(start, stop):
            assert swa[position] >= 0, f"no SWA place for token {position}"
            self.full[rank, full[position]] = self.swa[rank, swa[position]] = seen[position]
        for position in range(start):
            assert self.full[rank, full[position]] == seen[position], "FULL data of another prefix"
        for position in range(max(start - self.window + 1, 0), start):
            assert swa[position] >= 0, f"token {position} is in the window of {start} and gone"
            assert self.swa[rank, swa[position]] == seen[position], "SWA data of another prefix"
        self._measure()
        self.cache.advance_req(req, stop - start)
        return True

    def _measure(self) -> None:
        live = self.cache.live_requests()
        owned = sum(len(state.holding(ComponentType.SWA).owned()) for state in live)
        self.peak_owned = max(self.peak_owned, owned)

    def prefill(self, req: PlainRequest, chunk: int | None = None, upto: int | None = None) -> bool:
        """Forwards up to the prompt's end, cut into chunks, each published."""
        chunk = chunk or swa_of(self.cache).plan.extend_tokens
        stop = len(req.token_ids) if upto is None else upto
        while (start := self.cache.request_state(req.rid).computed_len) < stop:
            if not self.forward(req, min(start + chunk, stop)):
                return False
            self.cache.cache_unfinished_req(req)
        return True

    def decode(self, req: PlainRequest, tokens: list[int]) -> bool:
        """Append tokens one by one and compute them."""
        for token in tokens:
            req.token_ids.append(token)
            if not self.forward(req, len(req.token_ids)):
                return False
        return True

    def serve(
        self, tokens: list[int], answer: list[int] | None = None, rid: str = "r"
    ) -> MatchResult:
        """A whole request: prompt, answer, end; its match."""
        req = PlainRequest(rid, list(tokens))
        found = self.admit(req)
        assert found is not None, "the test's pools are too small"
        assert self.prefill(req) and self.decode(req, answer or [])
        self.cache.cache_finished_req(req)
        self.check()
        return found

    def check(self) -> None:
        """Every invariant, and every node's values lead to its own tokens."""
        self.cache.check_invariants()
        for node in self.cache.nodes()[1:]:
            path = [*node.path_to_root()][::-1]
            seen = states(t for part in path for t in part.key.tokens.tolist())
            for kind, pool in ((FULL, self.full), (SWA, self.swa)):
                value = node.component_data[kind].value
                for offset, index in enumerate([] if value is None else value.tolist()):
                    assert pool[node.dp_rank, index] == seen[node.start + offset], (kind, node)


def states(tokens: Iterable[int]) -> list[int]:
    """Per token, a hash of all up to it."""
    return list(accumulate(tokens, lambda state, token: hash((state, token)), initial=0))[1:]
