"""Which Hugging Face models have full attention in every layer, and what a layer caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uhrc_core.node import ComponentType
from uhrc_core.plan import LayerKind

#: Parts of config keys that tell of layers that are not full attention.
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

    ``shape`` has ``num_heads``, ``num_kv_heads`` and ``head_dim``, or for MLA ``kv_lora_rank`` and
    ``qk_rope_head_dim``.
    """
    config: Mapping[str, Any] = hf_config.get("text_config") or hf_config
    num_layers, num_heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not num_layers or not num_heads or _has_other_layers(config):
        return None
    shape = _mla_shape(config) if config.get("kv_lora_rank") else _gqa_shape(config, num_heads)
    if shape is None:
        return None
    return (LayerKind(ComponentType.FULL, shape),) * num_layers


def attention_of(layer: LayerKind) -> str:
    """``mla``, ``mha`` or ``gqa``."""
    if "kv_lora_rank" in layer.shape:
        return "mla"
    return "mha" if layer.shape["num_heads"] == layer.shape["num_kv_heads"] else "gqa"


def _has_other_layers(config: Mapping[str, Any]) -> bool:
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return True
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return True
    return any(value and any(part in key for part in _OTHER_KINDS) for key, value in config.items())


def _mla_shape(config: Mapping[str, Any]) -> dict[str, int] | None:
    if not config.get("qk_rope_head_dim"):
        return None
    return {
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_rope_head_dim": config["qk_rope_head_dim"],
    }


def _gqa_shape(config: Mapping[str, Any], num_heads: int) -> dict[str, int] | None:
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // num_heads
    if not head_dim:
        return None
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
