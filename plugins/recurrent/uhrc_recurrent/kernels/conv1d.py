"""The short causal convolution before a linear-attention layer: depthwise, then SiLU, with a state.

    y_t = silu(bias + sum over i < kernel of weight[:, i] * x_(t - kernel + 1 + i))

The state is the last kernel - 1 inputs of the sequence, oldest first (Hugging Face keeps `kernel`
columns, of which the first is never read again). A fresh sequence has zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from uhrc_recurrent.kernels import Kernel
from uhrc_recurrent.kernels.walk import Walk, walk_tokens

Bias = jax.Array | None

CONV1D_STEP = Kernel("conv1d_step")
CONV1D_PREFILL = Kernel("conv1d_prefill")


def conv1d_step(
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array,
    bias: jax.Array | None = None,
    *,
    implementation: str = "auto",
) -> Walk:
    """One decoded token per row.

    x: [R, C]. weight: [C, kernel]. state: [R, kernel - 1, C]. bias: [C], None for zeros.
    Returns y [R, C] in x's dtype (float32 inside) and the new state in state's dtype.
    """
    return CONV1D_STEP.pick(implementation)(x, weight, state, bias)


def conv1d_prefill(
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array,
    lens: jax.Array,
    bias: jax.Array | None = None,
    *,
    implementation: str = "auto",
) -> Walk:
    """lens[r] tokens of each row, from its state to its final state.

    x: [R, W, C]; whatever stands beyond lens[r] is not read. weight: [C, kernel].
    state: [R, kernel - 1, C]. lens: int32[R], 0 <= lens <= W; a row of 0 tokens keeps its state.
    bias: [C], None for zeros.
    Returns y [R, W, C] in x's dtype (zeros beyond lens) and the final states. A prefill cut
    anywhere gives the bits of the uncut one.
    """
    return CONV1D_PREFILL.pick(implementation)(x, weight, state, lens, bias)


@CONV1D_STEP.register("reference", "xla")
def _step(x: jax.Array, weight: jax.Array, state: jax.Array, bias: Bias) -> Walk:
    window = jnp.concatenate([state, x[:, None].astype(state.dtype)], axis=1)
    return _convolve(window, weight, bias, 1)[:, 0].astype(x.dtype), window[:, 1:]


@CONV1D_PREFILL.register("reference")
def _by_token(
    x: jax.Array, weight: jax.Array, state: jax.Array, lens: jax.Array, bias: Bias
) -> Walk:
    return walk_tokens(lambda token, state: _step(token, weight, state, bias), x, state, lens)


@CONV1D_PREFILL.register("xla")
def _all_at_once(
    x: jax.Array, weight: jax.Array, state: jax.Array, lens: jax.Array, bias: Bias
) -> Walk:
    width = x.shape[1]
    used = (jnp.arange(width) < lens[:, None])[..., None]
    inputs = jnp.concatenate([state, jnp.where(used, x, 0).astype(state.dtype)], axis=1)
    y = jnp.where(used, _convolve(inputs, weight, bias, width), 0).astype(x.dtype)
    last = lens[:, None] + jnp.arange(state.shape[1])
    return y, jnp.take_along_axis(inputs, last[..., None], axis=1)


def _convolve(inputs: jax.Array, weight: jax.Array, bias: Bias, width: int) -> jax.Array:
    """silu of the convolution at the last `width` of inputs [R, kernel - 1 + width, C], float32.

    The bias and then the taps are added one by one, oldest first, so that step and prefill round
    alike.
    """
    taps = weight.astype(jnp.float32)
    start = jnp.zeros(()) if bias is None else bias.astype(jnp.float32)
    total = jnp.broadcast_to(start, (inputs.shape[0], width, inputs.shape[2]))
    for i in range(taps.shape[1]):
        total += inputs[:, i : i + width].astype(jnp.float32) * taps[:, i]
    return jax.nn.silu(total)
