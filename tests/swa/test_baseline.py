"""SWARadixCache against the unified (FULL, SWA) tree: same calls, same hits, same frees."""

from __future__ import annotations

import pytest

from tests.swa.fake_device import FULL, SWA, Sizes, WindowDevice, spans, window_cache
from tests.swa.test_random import CASES, Program, random_cache
from uhrc_core.baseline import ChunkCache, RadixCache, SWAChunkCache, SWARadixCache
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import InsertParams
from uhrc_core.errors import InvalidIndexError, InvalidParamsError


def state_of(cache: BasePrefixCache) -> list[object]:
    """What both caches define: structure, owners, locks and sizes, in an order of its own."""
    nodes = [
        (
            [*(part.key.data for part in node.path_to_root())],
            node.key.namespace,
            [
                (None if data.value is None else data.value.tolist(), data.lock_ref)
                for data in node.component_data
            ],
            [data.last_access_time for data in node.component_data if data.value is not None],
        )
        for node in cache.nodes()[1:]
    ]
    counts = [component.allocator.ledger.counts for component in cache.components]
    evicted = cache.stats().evicted
    return [sorted(nodes, key=repr), counts, evicted, cache.stats().hit_num_tokens]


@pytest.mark.parametrize(("page_size", "window_pages", "dp_size"), CASES)
def test_equal_calls_give_equal_hits_and_frees(
    page_size: int, window_pages: float, dp_size: int
) -> None:
    seed = 77 * page_size + int(10 * window_pages)
    print(f"seed {seed}")
    unified, plain = (
        Program(random_cache(page_size, window_pages, dp_size, kind), seed)
        for kind in (None, SWARadixCache)
    )
    for step in range(600):
        unified.step()
        plain.step()
        assert state_of(unified.cache) == state_of(plain.cache), f"step {step}"
    assert unified.hits > 10 and unified.window_misses > 5
    assert unified.cache.stats().miss_reasons["swa_window"] > 0
    for program in (unified, plain):
        program.drain()


def test_a_plain_tree_serves_requests() -> None:
    device = WindowDevice(window_cache(Sizes(window=4, extend=8), SWARadixCache))
    prompt = list(range(20))
    assert [device.serve(prompt, [7, 8, 9]).hit_len for _ in range(2)] == [0, 19]
    assert [has for *_, has in spans(device.cache)].count(False) >= 1


def test_without_sharing_the_window_is_freed_all_the_same() -> None:
    assert SWAChunkCache is ChunkCache
    cache = window_cache(Sizes(full_pages=200, swa_pages=20, window=4, extend=8), SWAChunkCache)
    device = WindowDevice(cache)
    for _ in range(2):
        assert device.serve(list(range(90)), list(range(50))).hit_len == 0
    assert device.peak_owned <= 4 + 8 + 2
    for kind in (FULL, SWA):
        assert cache.available_size(kind) == cache.components[kind].allocator.capacity


def test_the_full_tree_holds_no_window_data() -> None:
    with pytest.raises(InvalidParamsError, match="does not hold SWA"):
        window_cache(Sizes(), RadixCache)


def test_what_a_plain_tree_refuses_it_leaves_unchanged() -> None:
    cache = window_cache(Sizes(window=4, page_size=2), SWARadixCache)
    value = cache.token_allocator.alloc(8)
    assert value is not None
    before = cache.digest()
    for fields, error in (
        ({"swa_evicted_seqlen": 3}, InvalidParamsError),
        ({}, InvalidIndexError),
    ):
        with pytest.raises(error):
            cache.insert(InsertParams(key=RadixKey(list(range(8))), value=value, **fields))
        assert cache.digest() == before
