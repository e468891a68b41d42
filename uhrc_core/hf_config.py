"""What a Hugging Face ``config.json`` says of its layers, in the usual fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from uhrc_core.node import ComponentType
from uhrc_core.plan import LayerKind


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, which multimodal models nest."""
    nested = hf_config.get("text_config")
    return cast("Mapping[str, Any]", nested) if isinstance(nested, dict) else hf_config


def full_attention_layer(config: Mapping[str, Any]) -> LayerKind | None:
    """What one full-attention layer caches; ``None`` when its sizes are not all there.

    ``shape`` has ``num_heads``, ``num_kv_heads`` and ``head_dim``, or for MLA ``kv_lora_rank`` and
    ``qk_rope_head_dim``.
    """
    shape = _mla_shape(config) if config.get("kv_lora_rank") else _gqa_shape(config)
    return LayerKind(ComponentType.FULL, shape) if all(shape.values()) else None


def linear_layers_of(config: Mapping[str, Any], default: Callable[[int], bool]) -> tuple[int, ...]:
    """0-based ids of the linear layers: from ``layer_types``, else those ``default`` is true of."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(i for i in range(config["num_hidden_layers"]) if default(i))
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")


def size_of(config: Mapping[str, Any], key: str) -> int:
    """A positive number of the config; 0 where there is none."""
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _mla_shape(config: Mapping[str, Any]) -> dict[str, int]:
    return {key: size_of(config, key) for key in ("kv_lora_rank", "qk_rope_head_dim")}


def _gqa_shape(config: Mapping[str, Any]) -> dict[str, int]:
    num_heads = size_of(config, "num_attention_heads")
    return {
        "num_heads": num_heads,
        "num_kv_heads": size_of(config, "num_key_value_heads") or num_heads,
        "head_dim": size_of(config, "head_dim")
        or size_of(config, "hidden_size") // max(num_heads, 1),
    }
