"""Hostile callers of a (FULL, SWA) cache: tiny pools, wrong calls, exits at any moment.

Nothing wrong may be read, a call that raises has changed nothing, nothing leaks, and a request that
is alone always runs. The plain cache gets the same calls and must do the same.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.support import PlainRequest, match
from tests.swa.fake_device import FULL, SWA, Sizes, WindowDevice, insert, swa_of, take, window_cache
from uhrc_core.assemble import build_kv_cache
from uhrc_core.baseline import SWARadixCache
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import EvictParams, IncLockRefResult, InsertParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.config.loading import parse_config
from uhrc_core.errors import CacheError, ConfigError, ReceiptError
from uhrc_core.testing.faults import failing_allocation

_EVERYTHING = 10**9


def check_nothing_leaked(cache: BasePrefixCache) -> None:
    """With nobody left, all can be evicted."""
    cache.evict(EvictParams(num_tokens=_EVERYTHING, swa_num_tokens=_EVERYTHING))
    for component in cache.components:
        pool = component.allocator
        assert pool.available_size(0) == pool.capacity, component.kind
    assert len(cache.nodes()) == 1


# -- wrong calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "fields"),
    [
        (range(10), {"swa_evicted_seqlen": 3}),
        (range(10), {"prev_prefix_len": 1}),
        (range(10), {"prev_prefix_len": 10}),
        (range(10), {"prev_prefix_len": 2**40}),
        (range(9), {}),
        ([0, 1, 2, 3, 4, 5, 6, 7, 9, 8], {}),
        ([0, 1, 2, 3, 4, 5, 8, 9, 8, 9], {}),
    ],
)
def test_a_wrong_insert_changes_nothing(places: Any, fields: dict[str, Any]) -> None:
    """``places``: which of ten mapped indices are offered. The tree has 8 tokens, a tombstone
    among them."""
    cache = window_cache(Sizes(full_pages=16, swa_pages=16, page_size=2, window=2))
    insert(cache, list(range(8)), evicted=6)
    mine = np.array(take(cache, 10), np.int32)
    held = {FULL: [mine], SWA: [swa_of(cache).swa_allocator.translate(mine)]}
    before = cache.digest()
    with pytest.raises(CacheError):
        cache.insert(
            InsertParams(key=RadixKey(list(range(10))), value=mine[list(places)], **fields)
        )
    assert cache.digest() == before
    cache.check_invariants(held)


@pytest.mark.parametrize("cache_class", [UnifiedRadixCache, SWARadixCache])
def test_only_the_right_receipt_releases_and_only_once(cache_class: type[BasePrefixCache]) -> None:
    cache = window_cache(Sizes(page_size=2, window=2), cache_class)
    insert(cache, list(range(8)))
    node = match(cache, list(range(8))).best_match_node
    mine, other = cache.inc_lock_ref(node), cache.inc_lock_ref(node)
    cache.release_early(mine, SWA)
    cache.dec_lock_ref(node, mine.to_dec_params())
    before = cache.digest()
    root = cache.nodes()[0]
    for wrong in (mine, IncLockRefResult(999, node), IncLockRefResult(other.receipt_id, root)):
        with pytest.raises(ReceiptError):
            cache.dec_lock_ref(wrong.node, wrong.to_dec_params())
        with pytest.raises(ReceiptError):
            cache.release_early(wrong, SWA)
    assert cache.digest() == before
    cache.evict(EvictParams(num_tokens=_EVERYTHING, swa_num_tokens=_EVERYTHING))
    assert match(cache, list(range(8))).hit_len == 8  # the other still holds it
    cache.dec_lock_ref(node, other.to_dec_params())
    check_nothing_leaked(cache)


# -- exits at any moment ---------------------------------------------------------------------------


def steps_of_life(device: WindowDevice, req: PlainRequest, chunk: int) -> Iterator[None]:
    """One step of a request's life at a time; it stops where it would have to wait."""
    cache = device.cache
    found = cache.match_req(req)
    yield
    if cache.admit_req(req, found, len(req.token_ids) - found.hit_len) is None:
        return
    yield
    while (start := cache.request_state(req.rid).computed_len) < len(req.token_ids):
        stop = min(start + chunk, len(req.token_ids))
        if cache.extend_req(req, stop - start) is None:
            return
        yield
        if not device.forward(req, stop):
            return
        yield
        cache.cache_unfinished_req(req)
        yield


@pytest.mark.parametrize("how", ["abort_req", "retract_req", "cache_finished_req"])
@pytest.mark.parametrize("lengths", [(2, 7), (7, 2), (7, 7), (8, 6)])
def test_two_requests_of_one_prefix_in_step_leave_at_any_moment(
    lengths: tuple[int, int], how: str
) -> None:
    """Whenever they leave, both caches agree, and the third run of the prompt hits in full."""
    tokens, longest = list(range(50)), max(lengths)
    for num_steps in range(11):
        hits: list[list[int]] = []
        for cache_class in (UnifiedRadixCache, SWARadixCache):
            cache = window_cache(Sizes(6, 6, page_size=2, window=3, extend=4), cache_class)
            device = WindowDevice(cache)
            requests = [
                PlainRequest(f"r{n}", tokens[:n_tokens]) for n, n_tokens in enumerate(lengths)
            ]
            lives = [steps_of_life(device, req, 4) for req in requests]
            for _ in range(num_steps):
                for life in lives:
                    next(life, None)
                    device.check()
            for state in cache.live_requests():
                getattr(cache, how)(state.request)
                device.check()
            prompts = [tokens[:longest]] * 3
            hits.append([device.serve(prompt).hit_len for prompt in prompts])
            check_nothing_leaked(cache)
        assert hits[0] == hits[1], f"after {num_steps} steps"
        assert hits[0][2] == (longest - 1) // 2 * 2, f"after {num_steps} steps"


# -- alone in the smallest pool --------------------------------------------------------------------


def smallest_cache(tables: dict[str, Any]) -> BasePrefixCache:
    """With the fewest SWA pages that a config may have."""
    page_size = tables["cache"]["page_size"]
    for num_pages in range(1, 100):
        tables["components"]["swa"]["num_tokens"] = num_pages * page_size
        with suppress(ConfigError):
            return build_kv_cache(parse_config(tables))
    raise AssertionError("no size is large enough")


def random_smallest(rng: random.Random) -> tuple[WindowDevice, int]:
    """A cache whose pools are as small as a config allows, and how long its requests may be."""
    page_size = rng.choice((1, 2, 4))
    window = max(rng.randint(1, 3) * page_size + rng.choice((-1, 0, 1)), 1)
    longest = rng.choice((4 * page_size + 1, 8 * page_size))
    extend = rng.choice((1, page_size, 3 * page_size - 1)) or 1
    tables: dict[str, Any] = {
        "cache": {
            "enable_unified_radix_tree": rng.random() < 0.7,
            "page_size": page_size,
            "max_requests": 2,
            "max_context_len": longest,
        },
        "components": {
            "full": {"num_tokens": -(-longest // page_size) * page_size},
            "swa": {"window_tokens": window, "extend_tokens": extend},
        },
    }
    return WindowDevice(smallest_cache(tables)), longest


@pytest.mark.parametrize("seed", range(8))
def test_a_request_alone_always_runs(seed: int) -> None:
    """Whatever the tree holds, however much of it hits, wherever it is cut and published."""
    rng = random.Random(seed)
    device, longest = random_smallest(rng)
    cache, earlier = device.cache, [[0]]
    chunk = swa_of(cache).plan.extend_tokens
    for number in range(12):
        tokens = rng.choice(earlier)[: rng.randint(0, longest)]
        tokens = (tokens + rng.choices(range(3), k=longest))[: rng.randint(1, longest)]
        answer = rng.choices(range(3), k=rng.choice((0, longest - len(tokens))))
        req = PlainRequest(f"r{number}", list(tokens))
        found = cache.match_req(req)
        need = len(tokens) + len(answer) - found.hit_len
        assert cache.admit_req(req, found, need), f"seed {seed}: {req.rid} has to wait"
        while (start := cache.request_state(req.rid).computed_len) < len(tokens):
            stop = min(start + rng.randint(1, chunk), len(tokens))
            assert device.forward(req, stop), f"seed {seed}: {req.rid} has no page"
            if rng.random() < 0.5:
                cache.cache_unfinished_req(req)
            if rng.random() < 0.2:
                cache.evict(EvictParams(swa_num_tokens=rng.choice((1, _EVERYTHING))))
        assert device.decode(req, answer), f"seed {seed}: {req.rid} has no page to decode"
        leave = (cache.cache_finished_req, cache.retract_req, cache.abort_req)
        rng.choice(leave)(req)
        earlier.append(req.token_ids)
        device.check()
    check_nothing_leaked(cache)


@pytest.mark.parametrize("pool", [FULL, SWA])
@pytest.mark.parametrize("cache_class", [UnifiedRadixCache, SWARadixCache])
def test_any_allocation_may_fail(cache_class: type[BasePrefixCache], pool: int) -> None:
    """A request that got no page once asks again, and nothing of the first try is left."""
    k, failed = 0, True
    while failed:
        k += 1
        cache = window_cache(Sizes(8, 8, page_size=2, window=3, extend=4), cache_class)
        device, req = WindowDevice(cache), PlainRequest("r", list(range(13)))
        with failing_allocation(cache.components[pool].allocator, k) as count:
            assert device.admit(req)
            while (start := cache.request_state("r").computed_len) < len(req.token_ids):
                before, stop = cache.digest(), min(start + 4, len(req.token_ids))
                if device.forward(req, stop):
                    cache.cache_unfinished_req(req)
                else:
                    assert cache.digest() == before
            cache.cache_finished_req(req)
        failed = count.failed
        device.check()
        check_nothing_leaked(cache)
    assert k > 3


# -- determinism -----------------------------------------------------------------------------------

_PROGRAM = """
from tests.swa.fake_device import Sizes, window_cache
from uhrc_core.testing.actions import RandomProgram
sizes = Sizes(full_pages=12, swa_pages=9, page_size=2, window=3, extend=6, dp_size=2)
program = RandomProgram(window_cache(sizes), seed=5, window_tokens=3)
print(program.run(150)[-1])
"""


def test_the_seed_of_python_hashes_decides_nothing() -> None:
    """Hosts in lockstep are processes of their own."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("0", "77")
    }
    assert len(digests) == 1 and len(digests.pop().strip()) == 32
