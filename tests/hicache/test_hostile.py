"""A host tier that answers anything, under callers who ask at any moment, on the smallest pools.

Whatever it answers, nothing wrong is read, nothing leaks, and a request that is alone runs.
"""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from uhrc_core.assemble import build_kv_cache
from uhrc_core.cache.host_tier import (
    HiCacheComponent,
    HiCacheContext,
    HiCacheEvent,
    HostQuery,
    PrefetchEvent,
)
from uhrc_core.cache.params import EvictParams, MatchResult
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.config.loading import parse_config
from uhrc_core.errors import StaleNodeError
from uhrc_core.kinds import ComponentType
from uhrc_core.testing.actions import check_nothing_is_held, page_tokens
from uhrc_core.testing.faults import failing_allocation
from uhrc_core.testing.hicache import CopyingTier
from uhrc_core.testing.paper import PaperDevice, PlainRequest

PAGE, LONGEST, WINDOW = 2, 17, 5

#: As small as a config allows: a request of 17 tokens, its window and what it has locked.
TABLES: dict[str, dict[str, Any]] = {
    "FULL": {"full": {"num_tokens": 18}},
    "FULL and SWA": {
        "full": {"num_tokens": 18},
        "swa": {"window_tokens": WINDOW, "extend_tokens": 6, "num_tokens": 18},
    },
}

NONSENSE = [-1, -(10**9), 10**9, 3, True, False, None, 1.0, "4", np.int64(4), [4]]


def cache_of(components: dict[str, Any]) -> UnifiedRadixCache:
    cache = {
        "enable_unified_radix_tree": True,
        "page_size": PAGE,
        "max_requests": 2,
        "max_context_len": LONGEST,
    }
    built = build_kv_cache(parse_config({"cache": cache, "components": components}))
    assert isinstance(built, UnifiedRadixCache)
    return built


class PlacesOf:
    """One component's places of a paper device, as the pool that a tier reads and writes."""

    def __init__(self, device: PaperDevice, kind: ComponentType) -> None:
        self._device, self._kind = device, kind

    def read(self, units: np.ndarray) -> list[Any]:
        return [self._device.read((self._kind, 0, int(unit))) for unit in units]

    def write(self, units: np.ndarray, data: list[Any]) -> None:
        for unit, prefix in zip(units, data, strict=True):
            self._device.write((self._kind, 0, int(unit)), prefix)


class MoodyTier(CopyingTier):
    """Keeps all it is given; now and then it says no, or what makes no sense."""

    def __init__(self, context: HiCacheContext, rng: random.Random, nonsense: float) -> None:
        super().__init__(context)
        self._rng, self._nonsense = rng, nonsense
        self.events: list[HiCacheEvent] = []

    def lookup(self, query: HostQuery) -> Any:
        if self._rng.random() < self._nonsense:
            return self._rng.choice(NONSENSE)
        return super().lookup(query)

    def prefetch(self, event: PrefetchEvent) -> bool:
        self.events.append(event)  # held for ever; that must hold no memory of the cache's
        if self._rng.random() < self._nonsense:
            raise SystemExit("half way")
        return self._rng.random() < 0.9 and super().prefetch(event)


class Callers:
    """Requests that match, prefetch, and are admitted at any moment, with evictions between."""

    def __init__(self, components: dict[str, Any], seed: int, nonsense: float) -> None:
        self.rng = random.Random(seed)
        self.cache = cache_of(components)
        self.device = PaperDevice(self.cache, WINDOW if "swa" in components else None)
        parts = {
            part.kind: HiCacheComponent(
                part.allocator.capacity, device_pool=PlacesOf(self.device, part.kind)
            )
            for part in self.cache.components
        }
        context = HiCacheContext(PAGE, 1, parts)
        self.cache.attach_hicache(MoodyTier(context, self.rng, nonsense))
        self.waiting: list[tuple[PlainRequest, MatchResult]] = []
        self.running: list[PlainRequest] = []
        self.prompts: list[list[int]] = [[]]
        self.serial = 0
        self.num_prefetched = 0

    def run(self, num_steps: int) -> None:
        steps = [self.arrive, self.prefetch, self.admit, self.compute, self.compute, self.evict]
        for _ in range(num_steps):
            self.rng.choice([*steps, self.leave])()
            self.cache.check_invariants()
            self.device.check_tree()
        for req in self.running:
            self.cache.abort_req(req)
        check_nothing_is_held(self.cache, "at the end")
        self.num_prefetched = self.cache.stats().prefetched_num_tokens
        self.cache.reset()
        self.cache.check_invariants()

    def arrive(self) -> None:
        known = self.rng.choice(self.prompts)
        tokens = known[: self.rng.choice((len(known), self.rng.randint(0, LONGEST)))]
        tokens = (tokens + page_tokens(self.rng.choices((0, 1), k=8), PAGE))[:LONGEST]
        self.serial += 1
        req = PlainRequest(f"r{self.serial}", tokens[: self.rng.randint(1, LONGEST)])
        self.waiting = [*self.waiting[-3:], (req, self.cache.match_req(req))]

    def prefetch(self) -> None:
        """Perhaps for a match that is long stale, perhaps with a pool that has nothing left."""
        if not self.waiting:
            return
        at = self.rng.randrange(len(self.waiting))
        req, match = self.waiting[at]
        pool = self.rng.choice(self.cache.components).allocator
        before = self.cache.stats().prefetched_num_tokens
        with failing_allocation(pool, self.rng.choice((1, 99, 99))):
            found = self.cache.prefetch_req(req, match)
        brought = self.cache.stats().prefetched_num_tokens - before
        assert brought <= found.hit_len, f"{brought} tokens came, {found.hit_len} hit"
        if found is not match:
            self.device.check_hit(req.key(len(req.token_ids)), found)
        self.waiting[at] = (req, found)

    def admit(self) -> None:
        if not self.waiting:
            return
        req, match = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        before = self.cache.digest()
        try:
            state = self.cache.admit_req(req, match, len(req.token_ids) - match.hit_len)
        except StaleNodeError:
            assert self.cache.digest() == before
            return
        assert state or self.running, f"{req.rid} is alone and has to wait"
        if state:
            self.device.start(req)
            self.running.append(req)

    def compute(self) -> None:
        if not self.running:
            return
        req = self.rng.choice(self.running)
        start = self.cache.request_state(req.rid).computed_len
        stop = min(start + self.rng.randint(1, 6), len(req.token_ids))
        if start < stop:
            end = self.device.extend(req, stop)
            assert end or len(self.running) > 1, f"{req.rid} is alone and has no page"
            if end:
                self.device.forward(req, end)
            if self.rng.random() < 0.5:
                self.cache.cache_unfinished_req(req)

    def leave(self) -> None:
        if self.running:
            req = self.running.pop(self.rng.randrange(len(self.running)))
            leave = (self.cache.cache_finished_req, self.cache.retract_req, self.cache.abort_req)
            self.rng.choice(leave)(req)
            self.prompts = [*self.prompts[-5:], req.token_ids]

    def evict(self) -> None:
        kind = self.rng.choice(self.cache.components).kind
        self.cache.evict(EvictParams(**{kind.evict_field: self.rng.choice((1, 10**6))}))


@pytest.mark.parametrize("components", TABLES)
def test_a_tier_that_works_under_hostile_callers(components: str) -> None:
    num_tokens = 0
    for seed in range(6):
        callers = Callers(TABLES[components], seed, nonsense=0)
        callers.run(400)
        assert callers.cache.hicache.fault is None, f"seed {seed}"
        num_tokens += callers.num_prefetched
    assert num_tokens > 50


@pytest.mark.parametrize("components", TABLES)
def test_a_tier_that_answers_anything_costs_nobody_anything(components: str) -> None:
    num_faults = 0
    for seed in range(6):
        callers = Callers(TABLES[components], seed, nonsense=0.05)
        callers.run(400)
        num_faults += callers.cache.hicache.fault is not None
    assert num_faults >= 2


@pytest.mark.parametrize("answer", NONSENSE, ids=repr)
def test_an_answer_of_no_sense_is_no_hit(answer: object) -> None:
    callers = Callers(TABLES["FULL and SWA"], 0, nonsense=0)
    cache, req = callers.cache, PlainRequest("r", list(range(9)))
    with patch.object(cache.hicache.hooks, "lookup", lambda query: answer):
        match = cache.match_req(req)
    assert match.host_hit_length == 0
    assert "lookup" in str(cache.hicache.fault)
    assert cache.prefetch_req(req, match) is match
    check_nothing_is_held(cache, f"after {answer!r}")
