"""A mixture of SwiGLU experts: each token goes through its top-k experts."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_engine.models import blocks
from uhrc_engine.models.contract import Params, TensorReader


def softmax_top_k(x: jax.Array, router: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Weights float32[N, k] and experts int32[N, k] of x [N, dim], router float32[dim, experts].

    The weights are the softmax over *all* experts, not renormalised over the chosen ones.
    """
    scores = x.astype(jnp.float32) @ router
    scores = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return jax.lax.top_k(scores / blocks.exact_sum(scores), top_k)


def experts(x: jax.Array, weights: jax.Array, chosen: jax.Array, layer: Params) -> jax.Array:
    """sum_k weights[n, k] * swiglu(x[n], expert chosen[n, k]) for x [N, dim].

    layer: {"gate_up": [experts, dim, 2 * intermediate], "down": [experts, intermediate, dim]}.
    Tokens are sorted by expert, so that each expert is one group of a ragged matrix product.
    """
    tokens, top_k = chosen.shape
    num_experts = layer["down"].shape[0]
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=num_experts).astype(jnp.int32)
    gate_up = jax.lax.ragged_dot(x[order // top_k], layer["gate_up"], sizes)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, layer["down"], sizes)
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    out = out.reshape(tokens, top_k, -1) * weights[..., None].astype(x.dtype)
    # One addition after the other: the order of a short `sum` would depend on the number of tokens.
    return reduce(jnp.add, (out[:, k] for k in range(top_k)))


def take_experts(
    tensors: TensorReader, prefix: str, count: int, dims: tuple[int, int], dtype: Any
) -> Params:
    """The experts under `prefix` ("….experts"), stacked; dims: (hidden, intermediate)."""
    hidden, intermediate = dims

    def stacked(name: str, shape: tuple[int, int]) -> np.ndarray:
        parts = (tensors.take(f"{prefix}.{e}.{name}.weight", shape) for e in range(count))
        return np.stack([part.T for part in parts])

    wide = (intermediate, hidden)
    gate_up = np.concatenate([stacked("gate_proj", wide), stacked("up_proj", wide)], axis=-1)
    return {
        "gate_up": blocks.to_device(gate_up, dtype),
        "down": blocks.to_device(stacked("down_proj", (hidden, intermediate)), dtype),
    }
