"""Which Hugging Face models have sliding-window layers, and what a layer caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uhrc_core.plugin_api import (
    ComponentType,
    ConfigError,
    LayerKind,
    full_attention_layer,
    layer_types_of,
    num_layers_of,
    size_of,
    text_config,
    window_layers_of,
)
from uhrc_full.model_layers import is_known

_KINDS = {"full_attention", "sliding_attention"}


def window_layers(hf_config: Mapping[str, Any]) -> tuple[LayerKind, ...] | None:
    """One `LayerKind` per layer of a model with sliding-window layers; ``None`` for any other.

    The shape of a window layer is that of a full one and ``window_tokens``. Raises ConfigError for
    such a model with a size that is none.
    """
    config = text_config(hf_config)
    num_layers = num_layers_of(config, 0)
    kinds = layer_types_of(config)
    windows = frozenset(window_layers_of(config, num_layers))
    full = full_attention_layer(config)
    if not is_known(hf_config) or full is None or not windows or not _KINDS.issuperset(kinds or ()):
        return None
    if kinds is not None and len(kinds) != num_layers:
        raise ConfigError(
            f"model.hf_config: layer_types names {len(kinds)} layers, num_hidden_layers is "
            f"{num_layers}"
        )
    if "kv_lora_rank" in full.shape:
        raise ConfigError("model.hf_config: sliding_window: not supported over MLA latents")
    window = size_of(config, "sliding_window")
    sliding = LayerKind(ComponentType.SWA, {**full.shape, "window_tokens": window})
    return tuple(sliding if i in windows else full for i in range(num_layers))
