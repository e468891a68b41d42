"""The Kimi Delta Attention layer of Kimi-Linear (arXiv 2510.26692) and of Ling 3.0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_engine.models import blocks
from uhrc_engine.models.contract import Params, StepInputs, TensorReader
from uhrc_engine.models.linear_attention import advance, run_tokens, short_conv, split
from uhrc_recurrent.kernels.delta import DeltaTokens
from uhrc_recurrent.kernels.kda import kda_log_decay, kda_prefill, kda_step
from uhrc_recurrent.pool import LayerState, RecurrentLayer


@dataclass(frozen=True, slots=True)
class KDA:
    """One layer's numbers, in elements."""

    hidden: int
    heads: int
    head_dim: int
    conv_kernel: int
    norm_eps: float
    low_rank: bool
    """Whether the decay and output gates go through `head_dim` values (Kimi) or not (Ling)."""
    decay_bound: float | None = None
    """Lowest log decay of the bounded ("safe") gate."""

    @property
    def channels(self) -> int:
        """Width of q, of k and of v."""
        return self.heads * self.head_dim

    @property
    def _in_sizes(self) -> tuple[int, ...]:
        """Of the input projection: q, k and v; decay gate; output gate; beta."""
        gate = self.head_dim if self.low_rank else self.channels
        return (3 * self.channels, gate, gate, self.heads)

    def take(self, tensors: TensorReader, prefix: str, dtype: Any) -> Params:
        """The layer's weights under `prefix`; every projection of its input is one matrix.

        The output projection is called o_proj or dense.
        """
        gates = ("f_a_proj", "g_a_proj") if self.low_rank else ("f_proj", "g_proj")
        names = ("q_proj", "k_proj", "v_proj", *gates, "b_proj")
        _, decay, gate, beta = self._in_sizes
        sizes = (self.channels,) * 3 + (decay, gate, beta)
        params: Params = {
            "in": blocks.take_linear(
                tensors,
                tuple(f"{prefix}.{name}" for name in names),
                tuple((size, self.hidden) for size in sizes),
                dtype,
            ),
            "conv": blocks.to_device(self._take_conv(tensors, prefix), dtype),
            "a_log": self._take_a_log(tensors, f"{prefix}.A_log"),
            "dt_bias": blocks.to_device(
                tensors.take(f"{prefix}.dt_bias", (self.channels,)), jnp.float32
            ),
            "norm": blocks.take_vector(tensors, f"{prefix}.o_norm", self.head_dim, jnp.float32),
        }
        if self.low_rank:
            shape = ((self.channels, self.head_dim),)
            params["decay_up"] = blocks.take_linear(tensors, (f"{prefix}.f_b_proj",), shape, dtype)
            params["gate_up"] = blocks.take_linear(tensors, (f"{prefix}.g_b_proj",), shape, dtype)
        out = "dense" if f"{prefix}.dense.weight" in tensors else "o_proj"
        params["out"] = blocks.take_linear(
            tensors, (f"{prefix}.{out}",), ((self.hidden, self.channels),), dtype
        )
        return params

    def _take_conv(self, tensors: TensorReader, prefix: str) -> np.ndarray:
        """[3 * channels, kernel]: q, k, v."""
        shape = (self.channels, 1, self.conv_kernel)
        parts = [tensors.take(f"{prefix}.{name}_conv1d.weight", shape) for name in "qkv"]
        return np.concatenate(parts)[:, 0]

    def _take_a_log(self, tensors: TensorReader, name: str) -> jax.Array:
        """float32[heads]; Kimi, which also has the low-rank gates, stores it with four axes."""
        shape = (1, 1, self.heads, 1) if self.low_rank else (self.heads,)
        return blocks.to_device(tensors.take(name, shape).reshape(-1), jnp.float32)

    def attend(
        self, layer: Params, x: jax.Array, cache: RecurrentLayer, inputs: StepInputs
    ) -> tuple[jax.Array, RecurrentLayer]:
        """x [R, W, hidden] -> (output [R, W, hidden], the layer's cache written)."""
        qkv, decay, gate, beta = split(blocks.linear(x, layer["in"]), self._in_sizes)
        if self.low_rank:
            decay = blocks.linear(decay, layer["decay_up"])
            gate = blocks.linear(gate, layer["gate_up"])
        log_decay = kda_log_decay(decay, layer["a_log"], layer["dt_bias"], self.decay_bound)
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))[..., None]

        def mix(state: LayerState) -> tuple[jax.Array, LayerState]:
            convolved, convs = short_conv(qkv, layer["conv"], state.convs, inputs)
            q, k, v = (self._by_head(part) for part in split(convolved, (self.channels,) * 3))
            tokens = DeltaTokens(q, k, v, log_decay, beta)
            out, temporal = run_tokens(kda_step, kda_prefill, tokens, state.temporal, inputs)
            return out, LayerState(temporal, convs)

        out, cache = advance(cache, inputs, mix)
        out = blocks.rms_norm(out, layer["norm"], self.norm_eps)
        out = out * jax.nn.sigmoid(self._by_head(gate).astype(jnp.float32))
        out = out.astype(x.dtype).reshape(*x.shape[:2], -1)
        return blocks.linear(out, layer["out"]), cache

    def _by_head(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.heads, self.head_dim)
