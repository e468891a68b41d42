"""Which models uhrc-full answers for, and what it says a layer caches."""

from __future__ import annotations

from typing import Any

import pytest

from uhrc_core.errors import ConfigError
from uhrc_core.kinds import ComponentType
from uhrc_full.model_layers import attention_of, full_layers
from uhrc_full.plugin import uhrc_component_specs

GQA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


def test_a_gqa_model() -> None:
    layers = full_layers(GQA)
    assert layers is not None and len(layers) == 3
    assert layers[0].component is ComponentType.FULL
    assert layers[0].shape == {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    assert attention_of(layers[0]) == "gqa"


def test_head_dim_may_differ_from_the_hidden_size() -> None:
    layers = full_layers({**GQA, "head_dim": 128})
    assert layers is not None and layers[0].shape["head_dim"] == 128


def test_an_mha_model_names_no_kv_heads() -> None:
    config = {key: value for key, value in GQA.items() if key != "num_key_value_heads"}
    layers = full_layers(config)
    assert layers is not None and layers[0].shape["num_kv_heads"] == 9
    assert attention_of(layers[0]) == "mha"


def test_an_mla_model() -> None:
    layers = full_layers({**GQA, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert layers is not None
    assert layers[0].shape == {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert attention_of(layers[0]) == "mla"


def test_the_text_part_of_a_multimodal_model_counts() -> None:
    assert full_layers({"model_type": "outer", "text_config": GQA}) == full_layers(GQA)


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        {"layer_types": ["chunked_attention"] * 3},
    ],
)
def test_a_model_with_other_layers_is_left_to_other_plugins(extra: dict[str, Any]) -> None:
    assert full_layers({**GQA, **extra}) is None


@pytest.mark.parametrize(
    "model_type", ["leaky", "jamba", "mamba2", "kimi_linear", "llama4_text", "falcon_h1", None, [1]]
)
def test_a_type_that_is_not_known_to_be_all_attention_is_not_claimed(model_type: object) -> None:
    """Its config may not tell of a state that a prefix needs beside its KV."""
    config = {**GQA, "model_type": model_type}
    assert full_layers(config) is None
    assert full_layers({"model_type": "outer", "text_config": config}) is None


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        {"layer_types": ["full_attention"] * 3},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_a_switched_off_window_is_full_attention(extra: dict[str, Any]) -> None:
    assert full_layers({**GQA, **extra}) == full_layers(GQA)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "rwkv"},
        {"num_hidden_layers": 3},
        {**GQA, "kv_lora_rank": 512},
    ],
)
def test_what_is_no_attention_model_is_not_claimed(config: dict[str, Any]) -> None:
    assert full_layers(config) is None


@pytest.mark.parametrize("value", [0, -1, "9", 1.5, True, [9], 2**31])
@pytest.mark.parametrize(
    "key",
    ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"],
)
def test_a_size_that_is_none_is_no_absent_size(key: str, value: Any) -> None:
    largest = 4096 if key == "num_hidden_layers" else 2**31 - 1
    with pytest.raises(ConfigError) as caught:
        full_layers({**GQA, key: value})
    assert str(caught.value) == (
        f"model.hf_config: {key} = {value!r}: must be an integer from 1 to {largest}"
    )


def test_a_size_that_is_null_is_absent() -> None:
    assert full_layers({**GQA, "head_dim": None, "kv_lora_rank": None}) == full_layers(GQA)


def test_a_head_has_a_dimension() -> None:
    with pytest.raises(ConfigError, match="hidden_size = 8: less than num_attention_heads = 9"):
        full_layers({**GQA, "hidden_size": 8})


def test_layer_types_are_names() -> None:
    with pytest.raises(ConfigError, match="layer_types = 3: must be a list of names"):
        full_layers({**GQA, "layer_types": 3})


def test_the_declared_kernels_are_the_registered_ones() -> None:
    from uhrc_full.kernels.attention import PAGED_ATTENTION
    from uhrc_full.kernels.kv_update import KV_UPDATE
    from uhrc_full.kernels.mla import MLA_ATTENTION

    (spec,) = uhrc_component_specs()
    registered = (KV_UPDATE, PAGED_ATTENTION, MLA_ATTENTION)
    assert spec.kernels == {kernel.name: kernel.implementations for kernel in registered}
