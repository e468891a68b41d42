"""GLA with constant decays, Lightning attention: MiniMax-Text-01 and Ling/Ring 2.5
(`bailing_hybrid`). See `kernels.gla`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uhrc_core.plugin_api import (
    BufferShape,
    ConfigTable,
    PositiveInt,
    RecurrentBackendSpec,
    RecurrentModel,
    StateLayout,
    linear_layers_of,
    num_layers_of,
    size_of,
    text_config,
)
from uhrc_recurrent.backends.kda import is_kda_bailing

_MINIMAX_TYPES = ("minimax", "minimax_text_01", "minimax_m1")


class GLAParams(ConfigTable):
    """Sizes of one GLA layer; q, k and v have the same heads."""

    num_heads: PositiveInt
    head_dim: PositiveInt


def state_layout(params: GLAParams) -> StateLayout:
    """A square state per head, no convolution."""
    shape = (params.num_heads, params.head_dim, params.head_dim)
    return StateLayout(BufferShape("temporal", shape, "float32"))


def matches_hf_config(hf_config: Mapping[str, Any]) -> RecurrentModel | None:
    """MiniMax by its model_type, Ling/Ring 2.5 as the ``bailing_hybrid`` without KDA keys."""
    config = text_config(hf_config)
    model_type = config.get("model_type")
    if model_type in _MINIMAX_TYPES:
        layers = _minimax_layers(config)
    elif model_type == "bailing_hybrid" and _is_gla_bailing(config):
        layers = _bailing_layers(config)
    else:
        return None
    return RecurrentModel(_params(config), layers, num_layers_of(config)) if layers else None


def _is_gla_bailing(config: Mapping[str, Any]) -> bool:
    """Its output norm works on groups of heads; a bailing_hybrid with neither mark is unknown."""
    return "group_norm_size" in config and not is_kda_bailing(config)


def _params(config: Mapping[str, Any]) -> GLAParams:
    heads = size_of(config, "num_attention_heads")
    head_dim = size_of(config, "head_dim", 0) or size_of(config, "hidden_size") // heads
    return GLAParams(num_heads=heads, head_dim=head_dim)


def _minimax_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """``attn_type_list`` (0 = linear) as first published, ``layer_types`` in transformers' form."""
    if types := config.get("attn_type_list"):
        return tuple(i for i, kind in enumerate(types) if kind == 0)
    return linear_layers_of(config, num_layers_of(config), lambda i: i % 2 == 1)


def _bailing_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The last layer of a group, and the layers after the last whole group, are attention."""
    group, num_layers = size_of(config, "layer_group_size"), num_layers_of(config)
    grouped = num_layers // group * group
    return linear_layers_of(config, num_layers, lambda i: (i + 1) % group != 0 and i < grouped)


GLA = RecurrentBackendSpec(
    name="gla",
    params_model=GLAParams,
    state_layout=state_layout,
    matches_hf_config=matches_hf_config,
    kernel_chunk=64,
    kernels=dict.fromkeys(("gla_step", "gla_prefill"), ("reference", "xla")),
)
