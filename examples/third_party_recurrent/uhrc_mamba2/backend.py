"""The backend ``mamba2``: what a Mamba-2 layer keeps of a sequence, and which models have such
layers. No jax; the kernels are in `ssd`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from uhrc_core.plugin_api import (
    BufferShape,
    ConfigError,
    ConfigTable,
    PositiveInt,
    RecurrentBackendSpec,
    RecurrentModel,
    StateLayout,
    conv_buffers,
    layer_types_of,
    num_layers_of,
    size_of,
    text_config,
)

_KERNELS = ("mamba2_step", "mamba2_prefill", "conv1d_step", "conv1d_prefill")
_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")


class Mamba2Params(ConfigTable):
    """Sizes of one Mamba-2 layer; a group of B and C serves ``num_heads / num_groups`` heads."""

    num_heads: PositiveInt
    head_dim: PositiveInt
    state_size: PositiveInt
    num_groups: PositiveInt
    conv_kernel: PositiveInt

    @property
    def channels(self) -> int:
        """Of x, and of the layer's output."""
        return self.num_heads * self.head_dim

    @property
    def group_channels(self) -> int:
        """Of B, and of C."""
        return self.num_groups * self.state_size


def state_layout(params: Mamba2Params) -> StateLayout:
    """A state per head, its last axis the state's own (128 in the published models, which fills a
    TPU's lanes), and a convolution each for x, B and C.

    The models have one convolution over the three; being depthwise it is three, and x can then be
    divided by heads.
    """
    temporal = (params.num_heads, params.head_dim, params.state_size)
    groups = params.group_channels
    return StateLayout(
        BufferShape("temporal", temporal, "float32"),
        conv_buffers(params.conv_kernel, conv_x=params.channels, conv_b=groups, conv_c=groups),
    )


def matches_hf_config(hf_config: Mapping[str, Any]) -> RecurrentModel | None:
    """Bamba and GraniteMoeHybrid, and whoever describes Mamba-2 layers in the same keys.

    Not for a model of these families without such layers (some Granite 4 have attention alone),
    nor for Falcon-H1 (``mamba_d_ssm``), whose layers are both kinds at once.
    """
    config = text_config(hf_config)
    if "mamba_n_heads" not in config or "mamba_d_ssm" in config:
        return None
    num_heads, num_groups = size_of(config, "mamba_n_heads"), size_of(config, "mamba_n_groups", 1)
    if num_heads % num_groups:
        raise ConfigError(
            f"model.hf_config: mamba_n_heads = {num_heads}: not a multiple of mamba_n_groups = "
            f"{num_groups}"
        )
    params = Mamba2Params(
        num_heads=num_heads,
        head_dim=_head_dim(config, num_heads),
        state_size=size_of(config, "mamba_d_state"),
        num_groups=num_groups,
        conv_kernel=size_of(config, "mamba_d_conv", 4),
    )
    num_layers = num_layers_of(config)
    layers = _mamba_layers(config, num_layers)
    return RecurrentModel(params, layers, num_layers) if layers else None


def _head_dim(config: Mapping[str, Any], num_heads: int) -> int:
    """``mamba_d_head``, or for "auto" the head's share of the layer's width."""
    if config.get("mamba_d_head", "auto") != "auto":
        return size_of(config, "mamba_d_head")
    width = size_of(config, "mamba_expand", 2) * size_of(config, "hidden_size")
    if width % num_heads:
        raise ConfigError(
            f"model.hf_config: mamba_expand * hidden_size = {width}: not a multiple of "
            f"mamba_n_heads = {num_heads}, as mamba_d_head = 'auto' needs"
        )
    return width // num_heads


def _mamba_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """From ``layer_types`` (Granite, under either pair of names), else all layers but those in
    ``attn_layer_indices`` (Bamba)."""
    kinds = layer_types_of(config)
    if kinds is None:
        attention = _attention_layers(config, num_layers)
        return tuple(i for i in range(num_layers) if i not in attention)
    if unknown := sorted(set(kinds) - {*_MAMBA, *_ATTENTION}):
        raise ConfigError(
            f"model.hf_config: layer_types has {', '.join(map(repr, unknown))}; mamba2 knows "
            f"{', '.join((*_MAMBA, *_ATTENTION))}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind in _MAMBA)


def _attention_layers(config: Mapping[str, Any], num_layers: int) -> Collection[int]:
    indices = config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(i in range(num_layers) for i in indices):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(
            f"model.hf_config: attn_layer_indices = {indices!r}: must be a list of layers, from 0 "
            f"to {num_layers - 1}"
        )
    return cast("list[int]", indices)


MAMBA2 = RecurrentBackendSpec(
    name="mamba2",
    params_model=Mamba2Params,
    state_layout=state_layout,
    matches_hf_config=matches_hf_config,
    kernel_chunk=64,
    kernels=dict.fromkeys(_KERNELS, ("reference", "xla")),
)
