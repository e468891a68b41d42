"""GDN, Gated DeltaNet: Qwen3-Next and Qwen3.5. See `kernels.gdn`."""

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

_MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)
_KERNELS = ("gdn_step", "gdn_prefill", "conv1d_step", "conv1d_prefill")


class GDNParams(ConfigTable):
    """Sizes of one GDN layer; a key head serves ``num_value_heads / num_key_heads`` value heads."""

    num_key_heads: PositiveInt
    num_value_heads: PositiveInt
    key_head_dim: PositiveInt
    value_head_dim: PositiveInt
    conv_kernel: PositiveInt


def state_layout(params: GDNParams) -> StateLayout:
    """A state per value head, and a convolution each for q, k and v.

    The models have one convolution over q, k and v together; being depthwise it is three, and three
    buffers can be divided by heads.
    """
    keys = params.num_key_heads * params.key_head_dim
    values = params.num_value_heads * params.value_head_dim
    temporal = (params.num_value_heads, params.key_head_dim, params.value_head_dim)
    return StateLayout(
        BufferShape("temporal", temporal, "float32"),
        conv_buffers(params.conv_kernel, conv_q=keys, conv_k=keys, conv_v=values),
    )


def matches_hf_config(hf_config: Mapping[str, Any]) -> RecurrentModel | None:
    """Qwen3-Next and Qwen3.5, dense or MoE, nested in a ``text_config`` or not."""
    config = text_config(hf_config)
    if config.get("model_type", hf_config.get("model_type")) not in _MODEL_TYPES:
        return None
    params = GDNParams(
        num_key_heads=size_of(config, "linear_num_key_heads", 16),
        num_value_heads=size_of(config, "linear_num_value_heads", 32),
        key_head_dim=size_of(config, "linear_key_head_dim", 128),
        value_head_dim=size_of(config, "linear_value_head_dim", 128),
        conv_kernel=size_of(config, "linear_conv_kernel_dim", 4),
    )
    num_layers = num_layers_of(config)
    interval = size_of(config, "full_attention_interval", 4)
    layers = linear_layers_of(config, num_layers, lambda i: (i + 1) % interval != 0)
    return RecurrentModel(params, layers, num_layers) if layers else None


GDN = RecurrentBackendSpec(
    name="gdn",
    params_model=GDNParams,
    state_layout=state_layout,
    matches_hf_config=matches_hf_config,
    kernel_chunk=64,
    kernels=dict.fromkeys(_KERNELS, ("reference", "xla")),
)
