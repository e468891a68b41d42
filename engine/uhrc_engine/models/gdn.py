"""The Gated DeltaNet layer (arXiv 2412.06464) of Qwen3-Next and Qwen3.5."""

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
from uhrc_recurrent.kernels.gdn import gdn_log_decay, gdn_prefill, gdn_step
from uhrc_recurrent.pool import LayerState, RecurrentLayer


@dataclass(frozen=True, slots=True)
class GDN:
    """One layer's numbers, in elements; a key head serves value_heads / key_heads value heads."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float

    @property
    def _qkv_sizes(self) -> tuple[int, int, int]:
        keys = self.key_heads * self.key_dim
        return (keys, keys, self.value_heads * self.value_dim)

    @property
    def _in_sizes(self) -> tuple[int, ...]:
        """Of the input projection: q, k and v; output gate; beta; decay gate."""
        return (sum(self._qkv_sizes), self._qkv_sizes[2], self.value_heads, self.value_heads)

    def take(self, tensors: TensorReader, prefix: str, dtype: Any) -> Params:
        """The layer's weights under `prefix`; every projection of its input is one matrix."""
        channels = sum(self._qkv_sizes)
        conv = tensors.take(f"{prefix}.conv1d.weight", (channels, 1, self.conv_kernel))
        out = (f"{prefix}.out_proj",)
        return {
            "in": {"weight": blocks.to_device(self._take_in(tensors, prefix).T, dtype)},
            "conv": blocks.to_device(conv[:, 0], dtype),
            "a_log": self._take_per_head(tensors, f"{prefix}.A_log"),
            "dt_bias": self._take_per_head(tensors, f"{prefix}.dt_bias"),
            "norm": blocks.take_vector(tensors, f"{prefix}.norm", self.value_dim, jnp.float32),
            "out": blocks.take_linear(tensors, out, ((self.hidden, self._qkv_sizes[2]),), dtype),
        }

    def _take_in(self, tensors: TensorReader, prefix: str) -> np.ndarray:
        """[sum of `_in_sizes`, hidden].

        Qwen3.5 stores in_proj_qkv, _z, _b and _a. Qwen3-Next stores in_proj_qkvz and in_proj_ba,
        each ordered by key head: per key head its q and k rows, then the v and z rows (b and a
        rows) of the value heads it serves.
        """
        if f"{prefix}.in_proj_qkvz.weight" not in tensors:
            return np.concatenate(
                [
                    tensors.take(f"{prefix}.in_proj_{name}.weight", (size, self.hidden))
                    for name, size in zip(("qkv", "z", "b", "a"), self._in_sizes, strict=True)
                ]
            )
        q_size, k_size, v_size = (size // self.key_heads for size in self._qkv_sizes)
        served = self.value_heads // self.key_heads
        qkvz = self._take_grouped(
            tensors, f"{prefix}.in_proj_qkvz.weight", (q_size, k_size, v_size, v_size)
        )
        return np.concatenate(
            qkvz + self._take_grouped(tensors, f"{prefix}.in_proj_ba.weight", (served, served))
        )

    def _take_grouped(
        self, tensors: TensorReader, name: str, sizes: tuple[int, ...]
    ) -> list[np.ndarray]:
        """The parts of a matrix whose rows are `sizes` rows for each key head in turn."""
        rows = tensors.take(name, (self.key_heads * sum(sizes), self.hidden))
        grouped = rows.reshape(self.key_heads, sum(sizes), self.hidden)
        parts = np.split(grouped, np.cumsum(sizes)[:-1], axis=1)
        return [part.reshape(-1, self.hidden) for part in parts]

    def _take_per_head(self, tensors: TensorReader, name: str) -> jax.Array:
        return blocks.to_device(tensors.take(name, (self.value_heads,)), jnp.float32)

    def attend(
        self, layer: Params, x: jax.Array, cache: RecurrentLayer, inputs: StepInputs
    ) -> tuple[jax.Array, RecurrentLayer]:
        """x [R, W, hidden] -> (output [R, W, hidden], the layer's cache written)."""
        qkv, gate, beta, decay = split(blocks.linear(x, layer["in"]), self._in_sizes)
        log_decay = gdn_log_decay(decay, layer["a_log"], layer["dt_bias"])
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))[..., None]
        rows = x.shape[:2]

        def mix(state: LayerState) -> tuple[jax.Array, LayerState]:
            convolved, convs = short_conv(qkv, layer["conv"], state.convs, inputs)
            q, k, v = split(convolved, self._qkv_sizes)
            tokens = DeltaTokens(
                q.reshape(*rows, self.key_heads, self.key_dim),
                k.reshape(*rows, self.key_heads, self.key_dim),
                v.reshape(*rows, self.value_heads, self.value_dim),
                log_decay,
                beta,
            )
            out, temporal = run_tokens(gdn_step, gdn_prefill, tokens, state.temporal, inputs)
            return out, LayerState(temporal, convs)

        out, cache = advance(cache, inputs, mix)
        out = blocks.rms_norm(out, layer["norm"], self.norm_eps)
        out = out * jax.nn.silu(gate.reshape(out.shape).astype(jnp.float32))
        return blocks.linear(out.astype(x.dtype).reshape(*rows, -1), layer["out"]), cache
