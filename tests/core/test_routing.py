"""DP routing: every sentence of its rules, on loads and a probe made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest

from tests.support import full_cache
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import InsertParams
from uhrc_core.registry.tables import DpSchedulePolicy
from uhrc_core.scheduling.routing import (
    ROUTING_POLICIES,
    CacheAware,
    DpRouter,
    MinRunningQueue,
    PrefixProbe,
    RankLoad,
    RoundRobin,
    RoutingPolicy,
    ShapeAware,
)

PROMPT = RadixKey(list(range(101)))


def load(running: int = 0, pending: int = 0, prefill: int = 0, decode: int = 0) -> RankLoad:
    return RankLoad(running, pending, prefill, decode, max_requests=100)


def cached(*hits: int) -> PrefixProbe:
    """A probe that finds ``hits[rank]`` tokens."""
    return lambda key: min(hits[key.dp_rank], len(key))


def route(policy: RoutingPolicy, loads: Sequence[RankLoad], *hits: int) -> int | None:
    return DpRouter(policy, loads, cached(*(hits or [0] * len(loads)))).route(PROMPT)


def test_there_is_a_policy_for_every_name_of_the_config() -> None:
    assert set(ROUTING_POLICIES) == set(get_args(DpSchedulePolicy))


# -- the simple policies -----------------------------------------------------------------------


def test_min_running_queue_counts_running_and_pending() -> None:
    assert route(MinRunningQueue(), [load(3, 1), load(1, 4), load(2, 1)]) == 2


def test_ties_go_to_the_lowest_rank() -> None:
    for policy in (MinRunningQueue(), ShapeAware(), RoundRobin(), CacheAware()):
        assert route(policy, [load(), load(), load()]) == 0


def test_round_robin_goes_on_between_rounds_and_skips_full_ranks() -> None:
    policy = RoundRobin()
    loads = [load(), load(100), load()]
    assert [route(policy, loads) for _ in range(4)] == [0, 2, 0, 2]


def test_shape_aware_weighs_prefill_and_decode_tokens() -> None:
    loads = [load(1, 0, 500, 500), load(9, 0, 0, 900), load(1, 0, 950, 0)]
    assert route(ShapeAware(), loads) == 1
    assert route(ShapeAware(), [load(5, 0, 10, 0), load(2, 0, 0, 10)]) == 1


# -- cache_aware: balance first ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "idle", "expected"),
    [
        (33, 0, 1),  # 33 apart: the load decides, against the cache
        (32, 0, 0),  # 32 apart is not more than 32
        (30, 10, 0),  # 20 apart: that they are 40 together is nothing to go by
        (100 - 1, 50, 1),
    ],
)
def test_ranks_more_than_32_requests_apart_are_balanced(
    busy: int, idle: int, expected: int
) -> None:
    assert route(CacheAware(), [load(busy), load(idle)], 100, 0) == expected


def test_a_large_queue_must_also_be_a_tenth_longer() -> None:
    def loads(busy: int, idle: int) -> list[RankLoad]:
        return [RankLoad(busy, 0, 0, 0, 1000), RankLoad(idle, 0, 0, 0, 1000)]

    assert route(CacheAware(), loads(440, 400), 100, 0) == 0  # 440 is not more than 1.1 * 400
    assert route(CacheAware(), loads(441, 400), 100, 0) == 1


def test_pending_requests_count_for_the_balance() -> None:
    assert route(CacheAware(), [load(0, 33), load()], 100, 0) == 1


# -- cache_aware: affinity ---------------------------------------------------------------------


def test_a_hit_of_more_than_half_of_the_reusable_prefix_attracts() -> None:
    # 101 tokens: 100 can be reused, so the hit must exceed 50.
    assert route(CacheAware(), [load(), load(5)], 0, 51) == 1
    assert route(CacheAware(), [load(), load(5)], 0, 50) == 0


def test_the_last_token_of_the_prompt_is_never_reusable() -> None:
    probed: list[int] = []

    def probe(key: RadixKey) -> int:
        probed.append(len(key))
        return 0

    DpRouter(CacheAware(), [load(), load()], probe).route(PROMPT)
    assert set(probed) == {100}


def test_among_holders_the_least_loaded_wins() -> None:
    assert route(CacheAware(), [load(7), load(4), load(0)], 100, 60, 0) == 1


def test_a_holder_without_room_is_passed_over() -> None:
    loads = [RankLoad(4, 0, 0, 0, 4), load(5), load(0, 0, 9, 9)]
    assert route(CacheAware(), loads, 100, 0, 0) == 1


def test_without_a_holder_the_shape_decides() -> None:
    assert route(CacheAware(), [load(1, 0, 0, 900), load(3, 0, 0, 300)], 50, 10) == 1


@pytest.mark.parametrize("tokens", [[], [1]])
def test_a_prompt_with_nothing_reusable_is_routed_by_shape(tokens: list[int]) -> None:
    router = DpRouter(CacheAware(), [load(0, 0, 5, 5), load(3)], cached(9, 0))
    assert router.route(RadixKey(tokens)) == 1


def test_the_probe_is_asked_in_the_namespace_of_the_request() -> None:
    seen: set[object] = set()

    def probe(key: RadixKey) -> int:
        seen.add(key.namespace)
        return 0

    key = RadixKey(list(range(9)), extra_key=("lora", "a"), dp_rank=1)
    DpRouter(CacheAware(), [load(), load()], probe).route(key)
    assert seen == {(("lora", "a"), 0), (("lora", "a"), 1)}


# -- rounds ------------------------------------------------------------------------------------


def test_requests_routed_in_a_round_count_for_the_next_ones() -> None:
    router = DpRouter(MinRunningQueue(), [load(), load(1)], cached(0, 0))
    assert [router.route(PROMPT) for _ in range(4)] == [0, 0, 1, 0]


def test_what_is_cached_does_not_count_as_prefill_work() -> None:
    router = DpRouter(ShapeAware(), [load(), load(0, 0, 20)], cached(90, 0))
    assert [router.route(PROMPT) for _ in range(4)] == [0, 0, 1, 0]


def test_when_every_rank_is_full_the_request_is_deferred() -> None:
    full = RankLoad(running=2, pending=1, prefill_tokens=0, decode_tokens=0, max_requests=3)
    for policy in ROUTING_POLICIES.values():
        assert route(policy(), [full, full]) is None


def test_a_round_fills_the_ranks_and_then_defers() -> None:
    one = RankLoad(running=0, pending=0, prefill_tokens=0, decode_tokens=0, max_requests=1)
    router = DpRouter(CacheAware(), [one, one], cached(100, 0))
    assert [router.route(PROMPT) for _ in range(3)] == [0, 1, None]


# -- with a real cache -------------------------------------------------------------------------


def test_probing_a_cache_finds_its_rank_and_changes_nothing() -> None:
    cache = full_cache(num_pages=32, dp_size=2)
    indices = cache.token_allocator.alloc(16, 1)
    assert indices is not None
    cache.insert(InsertParams(key=RadixKey(list(range(16)), dp_rank=1), value=indices))
    before = cache.digest()
    router = DpRouter(CacheAware(), [load(), load(3)], cache.peek_prefix_len)
    assert router.route(RadixKey(list(range(20)))) == 1
    assert router.route(RadixKey(list(range(20)), extra_key="other")) == 0
    assert cache.digest() == before
