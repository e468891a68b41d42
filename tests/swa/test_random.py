"""Random programs on small (FULL, SWA) pools, every invariant checked after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support import PlainRequest
from tests.swa.fake_device import FULL, SWA, Sizes, WindowDevice, states, swa_of, window_cache
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import EvictParams, IncLockRefResult, InsertParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.indices import IndexArray


@dataclass
class Program:
    """A random program of engine calls and of calls beside the engine; equal seeds, equal calls."""

    cache: BasePrefixCache
    seed: int
    live: dict[str, PlainRequest] = field(default_factory=dict)
    locks: list[IncLockRefResult] = field(default_factory=list)
    locked: dict[int, IndexArray] = field(default_factory=dict)
    hits: int = 0
    window_misses: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.device = WindowDevice(self.cache)
        self.page = self.cache.page_size
        self.count = 0

    def step(self) -> None:
        actions = [
            (self.arrive, 3),
            (self.advance, 8),
            (self.leave, 2),
            (self.evict, 1),
            (self.lock, 1),
            (self.unlock, 1),
            (self.insert, 1),
        ]
        action = self.random.choices([a for a, _ in actions], [w for _, w in actions])[0]
        action()
        self.count += 1
        self.cache.check_invariants()
        for node in self.cache.nodes():
            value = node.component_data[FULL].value
            if node.component_data[FULL].lock_ref and value is not None:
                before = self.locked.get(node.id, value)
                assert np.array_equal(before[-len(value) :], value), "locked indices changed"
                self.locked[node.id] = value
            else:
                self.locked.pop(node.id, None)
        if self.count % 10 == 0:
            self.device.check()

    def tokens(self) -> list[int]:
        """A sequence that shares pages, and parts of pages, with others."""
        pages = self.random.randint(0, 6)
        tokens: list[int] = []
        for depth in range(pages):
            branch = self.random.choice([0, 0, 0, 1, 2])
            tokens += [depth * 1000 + branch * 100_000 + i for i in range(self.page)]
        return tokens + [7 + i for i in range(self.random.randint(1, self.page))]

    def rank(self) -> int:
        return self.random.randrange(self.cache.dp_size)

    def arrive(self) -> None:
        req = PlainRequest(f"r{self.count}", self.tokens(), dp_rank=self.rank())
        found = self.device.admit(req)
        if found is not None:
            self.hits += found.hit_len > 0
            self.window_misses += found.full_hit_length > found.hit_len
            self.live[req.rid] = req

    def advance(self) -> None:
        if not self.live:
            return
        req = self.random.choice(list(self.live.values()))
        state = self.cache.request_state(req.rid)
        room = self.cache.req_to_token.max_context_len - len(req.token_ids)
        if state.computed_len == len(req.token_ids):
            grown = min(self.random.choice([1, 1, 1, self.page // 2 + 1]), room)
            req.token_ids += [self.random.randrange(50) for _ in range(grown)]
        left = min(len(req.token_ids) - state.computed_len, swa_of(self.cache).plan.extend_tokens)
        if left and self.device.forward(req, state.computed_len + self.random.randint(1, left)):
            if self.random.random() < 0.5:
                self.cache.cache_unfinished_req(req)
        elif left:
            self.end(req, self.cache.retract_req)

    def leave(self) -> None:
        if self.live:
            req = self.random.choice(list(self.live.values()))
            choices = [self.cache.cache_finished_req, self.cache.abort_req, self.cache.retract_req]
            self.end(req, self.random.choice(choices))

    def end(self, req: PlainRequest, how: object) -> None:
        assert callable(how)
        how(req)
        del self.live[req.rid]

    def evict(self) -> None:
        amount = self.random.randint(1, 3) * self.page
        fields = self.random.choice(
            [
                {"num_tokens": amount},
                {"swa_num_tokens": amount},
                {"swa_num_tokens": amount, "num_tokens": amount},
                {"swa_num_tokens": 10**6},
            ]
        )
        self.cache.evict(EvictParams(dp_rank=self.rank(), **fields))

    def lock(self) -> None:
        nodes = sorted(self.cache.nodes(), key=_place)
        node = self.random.choice(nodes)
        if len(self.locks) < 3:
            self.locks.append(self.cache.inc_lock_ref(node))
            if self.random.random() < 0.3:
                self.cache.release_early(self.locks[-1], SWA)

    def unlock(self) -> None:
        if self.locks:
            lock = self.locks.pop(self.random.randrange(len(self.locks)))
            self.cache.dec_lock_ref(lock.node, lock.to_dec_params())

    def insert(self) -> None:
        """Beside the engine: some tokens with window data from some page on."""
        tokens, rank = self.tokens(), self.rank()
        value = self.cache.token_allocator.alloc(len(tokens), rank)
        if value is None:
            return
        evicted = self.random.randint(0, len(tokens) // self.page) * self.page
        swa = swa_of(self.cache).swa_allocator
        if swa.alloc_for(value[evicted:], rank) is None:
            self.cache.token_allocator.free(value, rank)
            return
        for place, state in zip(value.tolist(), states(tokens), strict=True):
            self.device.full[rank, place] = state
        for place, state in zip(
            swa.translate(value[evicted:], rank).tolist(), states(tokens)[evicted:], strict=True
        ):
            self.device.swa[rank, place] = state
        key = RadixKey(tokens, None, rank)
        result = self.cache.insert(InsertParams(key=key, value=value, swa_evicted_seqlen=evicted))
        for part in (value[: result.prefix_len], value[result.inserted_len :]):
            swa.free_for(part, rank)
            self.cache.token_allocator.free(part, rank)

    def drain(self) -> None:
        """End everything and evict everything: nothing may be left."""
        for req in list(self.live.values()):
            self.end(req, self.cache.cache_finished_req)
        while self.locks:
            self.unlock()
        for rank in range(self.cache.dp_size):
            self.cache.evict(EvictParams(num_tokens=10**6, dp_rank=rank))
        self.cache.check_invariants()
        for component in self.cache.components:
            for rank in range(self.cache.dp_size):
                assert component.allocator.available_size(rank) == component.allocator.capacity


def _place(node: UnifiedTreeNode) -> tuple[str, bytes]:
    """Where a node is, whatever its number."""
    path = b"".join(part.key.data for part in reversed([*node.path_to_root()]))
    return (repr(node.key.namespace), path)


CASES = [
    (page_size, window_pages, dp_size)
    for page_size in (1, 16, 128)
    for window_pages, dp_size in ((0.5, 1), (1, 1), (2.5, 2))
]


@pytest.mark.parametrize(("page_size", "window_pages", "dp_size"), CASES)
def test_conservation_in_both_pools(page_size: int, window_pages: float, dp_size: int) -> None:
    steps = 1200  # 10,800 over all cases
    seed = 1000 * page_size + int(10 * window_pages)
    print(f"seed {seed}")
    program = Program(random_cache(page_size, window_pages, dp_size), seed)
    for _ in range(steps):
        program.step()
    program.device.check()
    stats = program.cache.stats()
    assert program.hits > 20 and program.window_misses > 5
    assert min(stats.evicted.swa_num_tokens_evicted, stats.evicted.num_tokens_evicted) > 100
    assert stats.miss_reasons["swa_window"] > 0
    program.drain()


def test_equal_programs_give_equal_caches() -> None:
    one, two = (Program(random_cache(4, 1.5, 2), seed=5) for _ in range(2))
    for _ in range(300):
        one.step()
        two.step()
    assert one.cache.digest() == two.cache.digest()


def random_cache(
    page_size: int,
    window_pages: float,
    dp_size: int,
    cache_class: type[BasePrefixCache] | None = None,
) -> BasePrefixCache:
    window = max(int(window_pages * page_size), 1)
    return window_cache(
        Sizes(
            full_pages=28,
            swa_pages=14,
            page_size=page_size,
            window=window,
            extend=2 * page_size,
            dp_size=dp_size,
        ),
        cache_class or UnifiedRadixCache,
    )
