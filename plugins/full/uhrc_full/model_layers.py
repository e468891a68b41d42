"""Which Hugging Face models have full attention in every layer, and what a layer caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uhrc_core.hf_config import (
    full_attention_layer,
    layer_types_of,
    num_layers_of,
    text_config,
    window_layers_of,
)
from uhrc_core.plan import LayerKind

#: Parts of config keys and model types that tell of layers that are not full attention.
_OTHER_KINDS = (
    "attn_layer",
    "attn_type",
    "block_type",
    "chunk",
    "hybrid",
    "linear",
    "lru",
    "mamba",
    "recurrent",
    "ssm",
    "state_size",
)


def full_layers(hf_config: Mapping[str, Any]) -> tuple[LayerKind, ...] | None:
    """One `LayerKind` per layer of an MHA, GQA or MLA model; ``None`` for any other model.

    Raises ConfigError for such a model with a size that is none.
    """
    config = text_config(hf_config)
    if _has_other_layers(config):
        return None
    num_layers = num_layers_of(config, 0)
    layer = full_attention_layer(config)
    return None if layer is None or not num_layers else (layer,) * num_layers


def attention_of(layer: LayerKind) -> str:
    """``mla``, ``mha`` or ``gqa``."""
    if "kv_lora_rank" in layer.shape:
        return "mla"
    return "mha" if layer.shape["num_heads"] == layer.shape["num_kv_heads"] else "gqa"


def _has_other_layers(config: Mapping[str, Any]) -> bool:
    if any(kind != "full_attention" for kind in layer_types_of(config) or ()):
        return True
    if window_layers_of(config, num_layers_of(config, 0)):
        return True
    named = [str(config.get("model_type")), *(key for key, value in config.items() if value)]
    return any(part in name for part in _OTHER_KINDS for name in named)
