"""KDA, Kimi Delta Attention: Kimi-Linear, and Ling 3.0 (`bailing_hybrid`). See `kernels.kda`."""

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
    conv_buffers,
    linear_layers_of,
    num_layers_of,
    size_of,
    text_config,
)

_KERNELS = ("kda_step", "kda_prefill", "conv1d_step", "conv1d_prefill")


class KDAParams(ConfigTable):
    """Sizes of one KDA layer; q, k and v have the same heads."""

    num_heads: PositiveInt
    head_dim: PositiveInt
    conv_kernel: PositiveInt


def state_layout(params: KDAParams) -> StateLayout:
    """A square state per head, and a convolution each for q, k and v."""
    channels = params.num_heads * params.head_dim
    return StateLayout(
        BufferShape("temporal", (params.num_heads, params.head_dim, params.head_dim), "float32"),
        conv_buffers(params.conv_kernel, conv_q=channels, conv_k=channels, conv_v=channels),
    )


def matches_hf_config(hf_config: Mapping[str, Any]) -> RecurrentModel | None:
    """Kimi-Linear by its ``linear_attn_config`` or model_type, Ling 3.0 by its KDA keys."""
    config = text_config(hf_config)
    if config.get("model_type") == "bailing_hybrid":
        return _ling(config) if is_kda_bailing(config) else None
    if config.get("model_type") == "kimi_linear" or "kda_layers" in _linear_attn(config):
        return _kimi(config)
    return None


def is_kda_bailing(config: Mapping[str, Any]) -> bool:
    """Whether a ``bailing_hybrid`` is of the KDA kind (3.0) rather than the GLA kind (2.5)."""
    architectures = config.get("architectures") or ()
    named = any("BailingMoeV3" in name or "BailingHybrid" in name for name in architectures)
    return named or any(key.startswith("kda_") or key == "no_kda_lora" for key in config)


def _linear_attn(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("linear_attn_config") or {}


def _kimi(config: Mapping[str, Any]) -> RecurrentModel:
    """The published form (1-based ids in ``linear_attn_config``) and that of transformers."""
    linear = _linear_attn(config)
    params = KDAParams(
        num_heads=size_of(linear, "num_heads", size_of(config, "linear_num_heads", 32)),
        head_dim=size_of(linear, "head_dim", size_of(config, "linear_head_dim", 128)),
        conv_kernel=size_of(
            linear, "short_conv_kernel_size", size_of(config, "linear_conv_kernel_dim", 4)
        ),
    )
    num_layers = num_layers_of(config, 27)
    if "kda_layers" in linear:
        layers = tuple(sorted(i - 1 for i in linear["kda_layers"]))
    else:
        layers = linear_layers_of(config, num_layers, lambda i: i == 0 or i % 4 != 0)
    return RecurrentModel(params, layers, num_layers)


def _ling(config: Mapping[str, Any]) -> RecurrentModel:
    # transformers writes linear_head_dim back, and head_dim then means the rotary part of MLA.
    params = KDAParams(
        num_heads=size_of(config, "linear_num_heads", size_of(config, "num_attention_heads", 32)),
        head_dim=size_of(config, "linear_head_dim", size_of(config, "head_dim", 128)),
        conv_kernel=size_of(config, "short_conv_kernel_size", 4),
    )
    num_layers, group = num_layers_of(config, 42), size_of(config, "layer_group_size", 6)
    layers = linear_layers_of(config, num_layers, lambda i: (i + 1) % group != 0)
    return RecurrentModel(params, layers, num_layers)


KDA = RecurrentBackendSpec(
    name="kda",
    params_model=KDAParams,
    state_layout=state_layout,
    matches_hf_config=matches_hf_config,
    kernel_chunk=64,
    kernels=dict.fromkeys(_KERNELS, ("reference", "xla")),
)
