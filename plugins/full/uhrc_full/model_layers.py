"""Which Hugging Face models have full attention in every layer, and what a layer caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

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
    text_config = hf_config.get("text_config")
    config = cast("Mapping[str, Any]", text_config) if isinstance(text_config, dict) else hf_config
    num_layers, num_heads = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads")
    if not num_layers or not num_heads or _has_other_layers(config):
        return None
    shape = _mla_shape(config) if config.get("kv_lora_rank") else _gqa_shape(config, num_heads)
    if not all(shape.values()):
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


def _mla_shape(config: Mapping[str, Any]) -> dict[str, int]:
    return {key: _size(config, key) for key in ("kv_lora_rank", "qk_rope_head_dim")}


def _gqa_shape(config: Mapping[str, Any], num_heads: int) -> dict[str, int]:
    return {
        "num_heads": num_heads,
        "num_kv_heads": _size(config, "num_key_value_heads") or num_heads,
        "head_dim": _size(config, "head_dim") or _size(config, "hidden_size") // num_heads,
    }


def _size(config: Mapping[str, Any], key: str) -> int:
    """A positive number of the config; 0 where there is none."""
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0
