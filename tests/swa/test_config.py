"""``[components.swa]``, and which layers of a Hugging Face model have a window."""

from __future__ import annotations

from typing import Any

import pytest

from uhrc_core.assemble import build_kv_cache, make_device_pools
from uhrc_core.baseline import ChunkCache, SWARadixCache
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.config.loading import parse_config
from uhrc_core.config.resolve import resolve
from uhrc_core.config.resolved import ResolvedConfig
from uhrc_core.errors import ConfigError
from uhrc_core.kinds import ComponentType
from uhrc_full.model_layers import full_layers
from uhrc_swa.component import SWAComponent
from uhrc_swa.model_layers import window_layers
from uhrc_swa.params import SWAParams

FULL, SWA = ComponentType.FULL, ComponentType.SWA
MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "sliding_window": 100,
}
ALTERNATING = {
    **MISTRAL,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def resolved(
    model: dict[str, Any] | None, cache: dict[str, Any] | None = None, **tables: dict[str, Any]
) -> ResolvedConfig:
    """Page 16, chunks of 64 tokens, ten requests of up to 1024 tokens."""
    source = {
        "cache": {
            "enable_unified_radix_tree": True,
            "page_size": 16,
            "max_requests": 10,
            "max_context_len": 1024,
            **(cache or {}),
        },
        "scheduler": {"chunked_prefill_size": 64},
        **tables,
    }
    return resolve(parse_config(source, environ={}), hf_config=model)


def table(model: dict[str, Any] | None, **keys: Any) -> SWAParams:
    components = {"full": {"num_tokens": 65536}, "swa": keys}
    params = resolved(model, components=components).config.components["swa"]
    assert isinstance(params, SWAParams)
    return params


# -- the table -----------------------------------------------------------------------------------


def test_the_window_is_the_models_and_the_chunk_the_schedulers() -> None:
    params = table(MISTRAL)
    assert (params.window_tokens, params.extend_tokens) == (100, 64)
    # Ten requests own 112 + 64 + 2 * 16 tokens each, and the tree may keep as many.
    assert params.num_tokens == 10 * 208 * 2
    assert table(MISTRAL, prefix_headroom=0.5).num_tokens == 10 * 208 * 1.5


def test_a_pool_sized_by_itself_has_no_more_tokens_than_full() -> None:
    components = {"full": {"num_tokens": 2048}, "swa": {"window_tokens": 600}}
    found = resolved(None, components=components).config.components["swa"]
    assert isinstance(found, SWAParams) and found.num_tokens == 2048


def test_a_model_of_a_type_nobody_knows_is_not_taken_for_one_of_windows() -> None:
    """Its other layers may keep something that a prefix needs."""
    assert kinds({**ALTERNATING, "model_type": "leaky"}) == "-"


def test_a_pool_sized_by_itself_runs_a_request() -> None:
    found = resolved(
        MISTRAL,
        {"max_requests": 1},
        components={"full": {"num_tokens": 65536}, "swa": {"prefix_headroom": 0.001}},
    ).config.components["swa"]
    assert isinstance(found, SWAParams) and found.num_tokens == 336


def test_a_request_never_owns_more_than_its_context() -> None:
    params = table(None, window_tokens=10_000)
    assert params.num_tokens == 10 * 1024 * 2
    assert params.num_units_min(16, 1024) == 1024


def test_without_a_chunk_size_a_forward_may_add_a_whole_prompt() -> None:
    components = {"full": {"num_tokens": 65536}, "swa": {"window_tokens": 100}}
    found = resolved(None, components=components, scheduler={}).config.components["swa"]
    assert isinstance(found, SWAParams) and found.extend_tokens == 1024


@pytest.mark.parametrize(
    ("keys", "model", "message"),
    [
        ({}, None, "components.swa.window_tokens: not set"),
        ({"window_tokens": 99}, MISTRAL, "window_tokens = 99: the model's is 100"),
        ({"num_tokens": 1000}, MISTRAL, "num_tokens = 1000: not whole pages"),
        ({"num_tokens": 304}, MISTRAL, "one request of cache.max_context_len = 1024 tokens needs"),
        ({"window_tokens": 0}, None, "window_tokens"),
        ({"extend_tokens": 63}, MISTRAL, "extend_tokens = 63: a forward adds up to scheduler."),
    ],
)
def test_a_wrong_table_is_refused(
    keys: dict[str, Any], model: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        table(model, **keys)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems


def test_the_smallest_pool_is_what_one_request_owns_and_has_locked() -> None:
    assert table(MISTRAL, num_tokens=336).num_tokens == 208 + 128


def test_the_cache_is_built_as_configured() -> None:
    cache = build_kv_cache(
        resolved(ALTERNATING, components={"full": {"num_tokens": 65536}, "swa": {}})
    )
    assert type(cache) is UnifiedRadixCache
    full, swa = cache.components
    assert isinstance(swa, SWAComponent) and swa.eviction_priority == 1
    assert swa.plan.window_tokens == swa.swa_allocator.window_tokens == 100
    assert (full.allocator.capacity, swa.allocator.capacity) == (65536, 4160)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"enable_unified_radix_tree": False}, SWARadixCache),
        ({"enable_unified_radix_tree": False, "disable_radix_cache": True}, ChunkCache),
        ({"disable_radix_cache": True}, ChunkCache),
    ],
)
def test_the_flags_choose_the_cache(flags: dict[str, Any], expected: type) -> None:
    components = {"full": {"num_tokens": 65536}, "swa": {}}
    assert type(build_kv_cache(resolved(MISTRAL, flags, components=components))) is expected


# -- models --------------------------------------------------------------------------------------


def test_a_model_picks_its_components_and_memory_sizes_the_full_pool() -> None:
    parts = resolved(ALTERNATING, memory={"hbm_bytes": 10_000_000}).components
    assert [part.spec.kind for part in parts] == [FULL, SWA]
    assert [len(part.layers) for part in parts] == [2, 2]
    pools = [part.pool for part in parts]
    assert pools[0] is not None and pools[1] is not None
    assert 9_990_000 < pools[0].num_bytes + pools[1].num_bytes <= 10_000_000


def test_in_a_model_of_window_layers_alone_full_keeps_indices_and_no_memory() -> None:
    found = resolved(MISTRAL)
    full, swa = found.components
    assert (full.params.num_units, len(full.layers), len(swa.layers)) == (10 * 1024, 0, 4)
    assert full.pool is not None and full.pool.num_bytes == 0
    pools = make_device_pools(found)
    assert (len(pools[ComponentType.FULL].buffers), len(pools[ComponentType.SWA].buffers)) == (0, 4)
    with pytest.raises(ConfigError, match=r"model\.hf_config: not set"):
        components = {"full": {"num_tokens": 65536}, "swa": {"window_tokens": 100}}
        make_device_pools(resolved(None, components=components))


def kinds(config: dict[str, Any]) -> str:
    layers = window_layers(config)
    return "-" if layers is None else "".join(layer.component.name[0] for layer in layers)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "SSSS"),
        ({"sliding_window": None}, "-"),
        ({"use_sliding_window": False}, "-"),
        ({"use_sliding_window": True, "max_window_layers": 3}, "FFFS"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "SSSS"),
        ({"use_sliding_window": True, "max_window_layers": 9}, "-"),
        ({"use_sliding_window": True}, "-"),  # published as 28, where it is not written down
        ({"model_type": "qwen3_moe"}, "-"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "FSSS"),
        ({"sliding_window_pattern": 2}, "SFSF"),
        ({"sliding_window_pattern": 3}, "SSFS"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 7}, "SSSSSFS"),
        ({"model_type": "gpt_oss"}, "SFSF"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "FFFS"),
        ({"layer_types": ["full_attention"] * 4}, "-"),
        ({"layer_types": ["chunked_attention"] * 3 + ["sliding_attention"]}, "-"),
    ],
)
def test_which_layers_have_a_window(changes: dict[str, Any], expected: str) -> None:
    config = {**MISTRAL, **changes}
    assert kinds(config) == expected
    assert kinds({"model_type": "outer", "text_config": config}) == expected
    # Each model is either plugin's or nobody's.
    assert expected == "-" or full_layers(config) is None


def test_a_window_layer_is_a_full_one_with_a_window() -> None:
    layers = window_layers({**ALTERNATING, "head_dim": 24})
    assert layers is not None
    assert layers[0].shape == {**layers[1].shape, "window_tokens": 100}
    assert layers[1].shape == {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types names 3 layers"),
        ({"sliding_window": -1}, "sliding_window = -1"),
        ({"sliding_window": "wide"}, "sliding_window = 'wide'"),
        ({"sliding_window_pattern": 0.5}, "sliding_window_pattern = 0.5"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 4}, "MLA"),
    ],
)
def test_an_impossible_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        window_layers({**MISTRAL, **changes})
