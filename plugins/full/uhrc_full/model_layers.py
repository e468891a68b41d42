"""Which Hugging Face models have full attention in every layer, and what a layer caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uhrc_core.plugin_api import (
    LayerKind,
    full_attention_layer,
    layer_types_of,
    num_layers_of,
    text_config,
    window_layers_of,
)

#: Families, by the model type of their text part, that have nothing but full attention (or windows
#: beside it). A model that has more, taken for one of these, would share its KV without the rest of
#: its state; so another type is nobody's until a plugin, or ``model.full_attention``, says so.
_NAMES = """
    apertus arcee baichuan bitnet cohere cohere2 deepseek_v2 deepseek_v3 dots1 ernie4_5
    ernie4_5_moe exaone4 falcon gemma gemma2 gemma3 gemma3_text glm glm4 glm4_moe gpt_neox gpt_oss
    granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe internlm2 internlm3
    kimi_k2 llama llava minicpm minicpm3 minimax_m2 ministral mistral mixtral nemotron olmo olmo2
    olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl
    qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 stablelm
    starcoder2
"""
FAMILIES = frozenset(_NAMES.split())


def is_known(hf_config: Mapping[str, Any]) -> bool:
    """Whether the model is of one of `FAMILIES`."""
    family = text_config(hf_config).get("model_type") or hf_config.get("model_type")
    return str(family) in FAMILIES


def full_layers(hf_config: Mapping[str, Any]) -> tuple[LayerKind, ...] | None:
    """One `LayerKind` per layer of an MHA, GQA or MLA model; ``None`` for any other model.

    Raises ConfigError for such a model with a size that is none.
    """
    config = text_config(hf_config)
    num_layers = num_layers_of(config, 0)
    if not is_known(hf_config) or window_layers_of(config, num_layers):
        return None
    if any(kind != "full_attention" for kind in layer_types_of(config) or ()):
        return None
    layer = full_attention_layer(config)
    return None if layer is None or not num_layers else (layer,) * num_layers


def attention_of(layer: LayerKind) -> str:
    """``mla``, ``mha`` or ``gqa``."""
    if "kv_lora_rank" in layer.shape:
        return "mla"
    return "mha" if layer.shape["num_heads"] == layer.shape["num_kv_heads"] else "gqa"
