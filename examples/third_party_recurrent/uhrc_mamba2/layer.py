"""The Mamba-2 layer (arXiv 2405.21060) of Bamba and GraniteMoeHybrid: weights and forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from uhrc_engine.models import blocks
from uhrc_engine.models.contract import Params, StepInputs, TensorReader
from uhrc_engine.models.errors import UnsupportedModelError
from uhrc_engine.models.linear_attention import advance, run_tokens, short_conv, split
from uhrc_mamba2.backend import Mamba2Params
from uhrc_mamba2.ssd import SSDTokens, mamba2_prefill, mamba2_step
from uhrc_recurrent.pool import LayerState, RecurrentLayer


@dataclass(frozen=True, slots=True)
class Mamba2:
    """One layer's numbers, in elements."""

    hidden: int
    sizes: Mamba2Params
    norm_eps: float
    conv_bias: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], sizes: Mamba2Params) -> Mamba2:
        """Raises UnsupportedModelError for bounds on the time step."""
        if tuple(config.get("time_step_limit") or (0.0, float("inf"))) != (0.0, float("inf")):
            raise UnsupportedModelError(
                f"time_step_limit = {config['time_step_limit']!r} is not supported; supported: "
                "(0, inf)"
            )
        return cls(
            hidden=config["hidden_size"],
            sizes=sizes,
            norm_eps=config["rms_norm_eps"],
            conv_bias=config.get("mamba_conv_bias", True),
        )

    @property
    def _conv_sizes(self) -> tuple[int, int, int]:
        """x, B and C."""
        return (self.sizes.channels, self.sizes.group_channels, self.sizes.group_channels)

    @property
    def _in_sizes(self) -> tuple[int, int, int]:
        """Of the input projection: output gate; x, B and C; time step."""
        return (self.sizes.channels, sum(self._conv_sizes), self.sizes.num_heads)

    def take(self, tensors: TensorReader, prefix: str, dtype: Any) -> Params:
        """The layer's weights under `prefix` ("….mamba")."""
        sizes, channels = self.sizes, sum(self._conv_sizes)
        conv = tensors.take(f"{prefix}.conv1d.weight", (channels, 1, sizes.conv_kernel))
        into, out = (f"{prefix}.in_proj",), (f"{prefix}.out_proj",)
        layer: Params = {
            "in": blocks.take_linear(tensors, into, ((sum(self._in_sizes), self.hidden),), dtype),
            "conv": blocks.to_device(conv[:, 0], dtype),
            "norm": self._take_norm(tensors, f"{prefix}.norm.weight"),
            "out": blocks.take_linear(tensors, out, ((self.hidden, sizes.channels),), dtype),
        }
        for name in ("A_log", "dt_bias", "D"):
            per_head = tensors.take(f"{prefix}.{name}", (sizes.num_heads,))
            layer[name] = blocks.to_device(per_head, jnp.float32)
        if self.conv_bias:
            bias = tensors.take(f"{prefix}.conv1d.bias", (channels,))
            layer["conv_bias"] = blocks.to_device(bias, dtype)
        return layer

    def _take_norm(self, tensors: TensorReader, name: str) -> jax.Array:
        """float32[groups, channels / groups]: a group is normed by itself."""
        weight = tensors.take(name, (self.sizes.channels,))
        return blocks.to_device(weight.reshape(self.sizes.num_groups, -1), jnp.float32)

    def attend(
        self, layer: Params, x: jax.Array, cache: RecurrentLayer, inputs: StepInputs
    ) -> tuple[jax.Array, RecurrentLayer]:
        """x [R, W, hidden] -> (output [R, W, hidden], the layer's cache written)."""
        sizes, rows = self.sizes, x.shape[:2]
        gate, xbc, dt = split(blocks.linear(x, layer["in"]), self._in_sizes)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + layer["dt_bias"])[..., None]
        a = -jnp.exp(layer["A_log"])

        def mix(state: LayerState) -> tuple[jax.Array, LayerState]:
            convolved, convs = short_conv(
                xbc, layer["conv"], state.convs, inputs, layer.get("conv_bias")
            )
            x, b, c = split(convolved, self._conv_sizes)
            tokens = SSDTokens(
                x.reshape(*rows, sizes.num_heads, sizes.head_dim),
                dt,
                b.reshape(*rows, sizes.num_groups, sizes.state_size),
                c.reshape(*rows, sizes.num_groups, sizes.state_size),
            )
            out, temporal = run_tokens(
                lambda token, state: mamba2_step(token, a, state),
                lambda tokens, state, lens: mamba2_prefill(tokens, a, state, lens),
                tokens,
                state.temporal,
                inputs,
            )
            skipped = tokens.x.astype(jnp.float32) * layer["D"][:, None]
            return out + skipped, LayerState(temporal, convs)

        out, cache = advance(cache, inputs, mix)
        gated = out.reshape(*rows, -1) * jax.nn.silu(gate.astype(jnp.float32))
        grouped = gated.reshape(*rows, sizes.num_groups, -1)
        normed = blocks.rms_norm(grouped, layer["norm"], self.norm_eps).reshape(gated.shape)
        return blocks.linear(normed.astype(x.dtype), layer["out"]), cache
