"""Whatever hook fails and whichever allocation, at whatever call: the cache stays sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from uhrc_core.cache.host_tier import HiCacheContext, HiCacheHooks, HostQuery
from uhrc_core.testing import CopyingTier, RandomProgram, failing_allocation
from uhrc_core.testing.hicache import CACHES
from uhrc_core.testing.hicache_bench import HostBench
from uhrc_core.testing.paper import PlainRequest


class TolerantBench(HostBench):
    """Goes on after a hook has failed."""

    def _check_hooks(self) -> None:
        pass


class FailsAt(HiCacheHooks):
    """A `CopyingTier` whose ``number``-th call raises, counted from 0, after its work is done."""

    def __init__(self, context: HiCacheContext, number: int) -> None:
        self._tier = CopyingTier(context)
        self._left = number

    def _then_fail(self, answer: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OSError("no space left on device")
        return answer

    def lookup(self, query: HostQuery) -> int:
        return self._then_fail(self._tier.lookup(query))

    def prefetch(self, event: Any) -> bool:
        return self._then_fail(self._tier.prefetch(event))

    def write_through(self, event: Any) -> None:
        self._then_fail(self._tier.write_through(event))

    def write_back(self, event: Any) -> None:
        self._then_fail(self._tier.write_back(event))

    def reset(self) -> None:
        self._then_fail(self._tier.reset())


def conversation(bench: HostBench) -> list[int]:
    """Turns of one conversation with everything evicted between; what each did not compute."""
    page_size, hits = bench.cache.page_size, list[int]()
    for turns in range(1, 4):
        tokens = [turn for turn in range(turns) for _ in range(2 * page_size + 1)]
        hits.append(bench.cached_len(PlainRequest(f"turn {turns}", tokens)))
        bench.evict()
    return hits


@pytest.mark.parametrize("tables", CACHES.values(), ids=CACHES)
def test_a_failure_at_any_call_ends_the_tier_and_no_request(tables: Mapping[str, Any]) -> None:
    failed, hits = 0, list[int]()
    for number in range(40):
        bench = TolerantBench(lambda context, at=number: FailsAt(context, at), tables)
        hits = conversation(bench)
        program = RandomProgram(bench.cache, number)
        program.device = bench
        program.run(8)
        program.end()
        failed += bench.cache.hicache.fault is not None
    assert failed > 10, "the numbers do not reach far"
    healthy = HostBench(CopyingTier, tables)
    assert hits == conversation(healthy) and hits[-1] > 0


@pytest.mark.parametrize("tables", CACHES.values(), ids=CACHES)
def test_an_allocation_that_fails_while_bringing_data_leaves_nothing(
    tables: Mapping[str, Any],
) -> None:
    page_size = tables["cache"]["page_size"]
    first = [0] * (2 * page_size + 1)
    for number in range(len(tables["components"])):
        bench = HostBench(CopyingTier, tables)
        bench.cached_len(PlainRequest("first", first))
        bench.evict()
        again = PlainRequest("again", first + [1] * page_size)
        found = bench.cache.match_req(again)
        assert found.host_hit_length
        allocator = bench.cache.components[number].allocator
        free = [c.allocator.available_size(0) for c in bench.cache.components]
        with failing_allocation(allocator, 1) as count:
            assert bench.cache.prefetch_req(again, found).hit_len == 0
        assert count.failed and bench.watch is not None and not bench.watch.prefetched
        assert [c.allocator.available_size(0) for c in bench.cache.components] == free
        bench.check_tree()
        assert bench.cached_len(again) == found.host_hit_length
