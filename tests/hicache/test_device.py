"""Real pools: what leaves the device through the hooks comes back with the same bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.fake_plugins import FakeSite
from tests.support import PlainRequest
from uhrc_core import build_kv_cache, make_device_pools, parse_config, resolve
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import EvictParams, InsertParams
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.config.resolved import ResolvedConfig
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.specs import HiCacheParams, HiCacheSpec
from uhrc_core.testing import CopyingTier
from uhrc_engine import Engine, Request
from uhrc_engine.assembly import EngineParts, build_parts
from uhrc_engine.weights import load_seeded
from uhrc_hicache_stub.hooks import RecordingHooks

HYBRIDS = Path(__file__).parents[2] / "configs" / "hybrid"
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128}
#: MLA beside KDA, and GQA beside GDN.
LAYERS: dict[str, dict[str, Any]] = {
    "kda": {
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        }
    },
    "gdn": {"layer_types": ["linear_attention", "full_attention"]},
}
FULL, RECURRENT = ComponentType.FULL, ComponentType.RECURRENT
INTERVAL = 128
COPYING = """
from uhrc_core.registry.specs import HiCacheSpec
from uhrc_core.testing import CopyingTier

@hookimpl
def uhrc_hicache_hooks():
    return [HiCacheSpec("copying", HiCacheParams, lambda params, context: CopyingTier(context))]
"""


@pytest.fixture
def copying(site: FakeSite) -> None:
    """The kit's tier, installed under the name ``copying``."""
    site.install("uhrc-copying", {"copying": "copying_module"}, COPYING)


def hf_config(name: str) -> dict[str, Any]:
    return json.loads((HYBRIDS / name / "config.json").read_text()) | SMALL | LAYERS[name]


# -- pools ---------------------------------------------------------------------------------------


def resolved_for(name: str) -> ResolvedConfig:
    tables = {
        "cache": {
            "enable_unified_radix_tree": True,
            "page_size": 4,
            "dp_size": 2,
            "max_requests": 2,
            "max_context_len": 32,
        },
        "components": {
            "full": {"num_tokens": 32},
            "recurrent": {"num_slots": 6, "enable_extra_buffer": True, "track_interval": 4},
        },
        "hicache": {"name": "copying"},
    }
    return resolve(parse_config(tables), hf_config=hf_config(name))


def random_like(data: Any, rng: np.random.Generator) -> Any:
    """What `read` gave, with random bits that are no NaN."""
    return jax.tree.map(lambda array: rng.standard_normal(array.shape).astype(array.dtype), data)


def assert_same_bits(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def fill_with_nan(pool: Any) -> None:
    pool.replace(jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), pool.buffers))


@pytest.mark.usefixtures("copying")
@pytest.mark.parametrize("dp_rank", [0, 1])
@pytest.mark.parametrize("name", LAYERS)
def test_kv_and_state_come_back_bit_for_bit(name: str, dp_rank: int) -> None:
    resolved = resolved_for(name)
    pools = make_device_pools(resolved)
    cache = build_kv_cache(resolved, pools)
    assert isinstance(cache, UnifiedRadixCache)
    tokens, slots = cache.token_allocator, cache.components[1].allocator
    value, slot = tokens.alloc(12, dp_rank), slots.alloc(1, dp_rank)
    assert value is not None and slot is not None
    rng = np.random.default_rng(dp_rank)
    kv = random_like(pools[FULL].read(value + 32 * dp_rank), rng)
    state = random_like(pools[RECURRENT].read(slot + 6 * dp_rank), rng)
    pools[FULL].write(value + 32 * dp_rank, kv)
    pools[RECURRENT].write(slot + 6 * dp_rank, state)
    key = RadixKey(list(range(12)), "lora", dp_rank)
    cache.insert(
        InsertParams(key=key, value=value, recurrent_value=int(slot[0]), recurrent_seqlen=12)
    )
    freed = cache.evict(EvictParams(num_tokens=12, dp_rank=dp_rank))
    assert (freed.num_tokens_evicted, freed.recurrent_num_evicted) == (12, 1)
    for pool in pools.values():
        fill_with_nan(pool)
    others = tokens.alloc(8, dp_rank), slots.alloc(2, dp_rank)  # so that it lands elsewhere

    req = PlainRequest("r", [*range(12), 99], "lora", dp_rank)
    found = cache.match_req(req)
    assert (found.hit_len, found.host_hit_length) == (0, 12)
    brought = cache.prefetch_req(req, found)
    assert cache.hicache.fault is None and brought.hit_len == 12
    assert brought.device_indices.tolist() != value.tolist()
    assert_same_bits(pools[FULL].read(brought.device_indices + 32 * dp_rank), kv)
    assert brought.recurrent_cow_src is not None and brought.recurrent_cow_src != slot[0]
    assert_same_bits(pools[RECURRENT].read([brought.recurrent_cow_src + 6 * dp_rank]), state)
    held = {FULL: [[], []], RECURRENT: [[], []]}
    for kind, indices in zip((FULL, RECURRENT), others, strict=True):
        assert indices is not None
        held[kind][dp_rank] = indices.tolist()
    cache.check_invariants({k: [np.array(i, np.int32) for i in v] for k, v in held.items()})


# -- the engine ----------------------------------------------------------------------------------


def engine_config() -> dict[str, Any]:
    return {
        "cache": {
            "enable_unified_radix_tree": True,
            "page_size": INTERVAL,
            "max_requests": 2,
            "max_context_len": 512,
        },
        "components": {
            "full": {"num_tokens": 1024},
            "recurrent": {
                "enable_extra_buffer": True,
                "num_slots": 8,
                "track_interval": INTERVAL,
            },
        },
        "scheduler": {"chunked_prefill_size": INTERVAL},
        "engine": {"prefill_widths": [INTERVAL], "decode_rows": [2]},
        "hicache": {"name": "stub"},
    }


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> EngineParts:
    """Compiled once, with the stub; a test may put another tier in its place."""
    folder = tmp_path_factory.mktemp("gdn")
    (folder / "config.json").write_text(json.dumps(hf_config("gdn")))
    return build_parts(load_seeded(folder, seed=3), parse_config(engine_config()))


def test_an_engine_answers_from_what_the_tier_brought_back(parts: EngineParts) -> None:
    spec = HiCacheSpec("copying", HiCacheParams, lambda _, context: CopyingTier(context))
    resolved = replace(parts.resolved, host_tier=spec)
    engine = Engine(replace(parts, cache=build_kv_cache(resolved, parts.runner.pools)))
    prompt = np.random.default_rng(0).integers(0, 500, 300).tolist()
    (first,) = engine.generate([Request(prompt, max_new_tokens=4)])
    assert first.cached_tokens == 0
    whole = EvictParams(num_tokens=1024, recurrent_num=8)
    assert engine.cache.evict(whole).num_tokens_evicted == 2 * INTERVAL
    for pool in parts.runner.pools.values():
        fill_with_nan(pool)

    again = Request([*prompt, *first.token_ids, 1, 2, 3], max_new_tokens=4)
    (brought,) = engine.generate([again])
    assert engine.cache.hicache.fault is None
    assert brought.cached_tokens == 2 * INTERVAL
    assert engine.cache.stats().prefetched_num_tokens == 2 * INTERVAL
    engine.cache.check_invariants()

    for pool in parts.runner.pools.values():
        pool.replace(jax.tree.map(jnp.zeros_like, pool.buffers))
    (computed,) = Engine(parts.without_reuse()).generate([again])
    assert computed.cached_tokens == 0 and brought.token_ids == computed.token_ids
    assert np.array_equal(brought.first_logits, computed.first_logits)


def test_an_engine_with_the_stub_calls_its_hooks(parts: EngineParts) -> None:
    engine = Engine(parts)
    prompt = np.random.default_rng(0).integers(0, 500, 140).tolist()
    engine.generate([Request(prompt, max_new_tokens=1)])
    engine.cache.evict(EvictParams(num_tokens=1024, recurrent_num=8))
    hooks = engine.cache.hicache.hooks
    assert isinstance(hooks, RecordingHooks) and engine.cache.hicache.fault is None
    assert (hooks.lookups, hooks.write_throughs.calls, hooks.write_backs.calls) == (1, 1, 1)
    full, recurrent = parts.resolved.components
    assert full.pool is not None and recurrent.pool is not None
    size = round(INTERVAL * full.pool.bytes_per_unit) + round(recurrent.pool.bytes_per_unit)
    assert hooks.write_throughs.num_bytes == hooks.write_backs.num_bytes == size
    assert hooks.write_backs.units[FULL] == INTERVAL and hooks.write_backs.units[RECURRENT] == 1
    assert parts.without_reuse().cache.hicache.hooks is None
