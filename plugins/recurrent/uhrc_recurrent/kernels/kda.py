"""Kimi Delta Attention (KDA): the delta rule with one decay per key channel.

Models: Kimi-Linear, Ling 3.0 (`bailing_hybrid` with a bounded gate). Formulas: arXiv 2510.26692.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from uhrc_recurrent.kernels import Kernel
from uhrc_recurrent.kernels.delta import (
    DeltaTokens,
    delta_prefill_by_chunk,
    delta_prefill_by_token,
    delta_step,
)
from uhrc_recurrent.kernels.walk import Walk

KDA_STEP = Kernel("kda_step")
KDA_PREFILL = Kernel("kda_prefill")
KDA_STEP.register("reference", "xla")(delta_step)
KDA_PREFILL.register("reference")(delta_prefill_by_token)
KDA_PREFILL.register("xla")(delta_prefill_by_chunk)


def kda_log_decay(
    x: jax.Array, a_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None = None
) -> jax.Array:
    """The gate: float32[..., H, K] log decay from the gate projection x [..., H * K].

    a_log: [H] in any shape of H elements. dt_bias: [H * K]. Without a bound (Kimi-Linear) it is
    -exp(a_log) softplus(x + dt_bias), in (-inf, 0); with one (Ling 3.0's "safe gate", a negative
    number) it is lower_bound * sigmoid(exp(a_log) (x + dt_bias)), in (lower_bound, 0).
    """
    rate = jnp.exp(a_log.astype(jnp.float32)).reshape(-1, 1)
    biased = x.astype(jnp.float32) + dt_bias.astype(jnp.float32).reshape(-1)
    biased = biased.reshape(*x.shape[:-1], rate.shape[0], -1)
    if lower_bound is None:
        return -rate * jax.nn.softplus(biased)
    return lower_bound * jax.nn.sigmoid(rate * biased)


def kda_step(tokens: DeltaTokens, state: jax.Array, *, implementation: str = "auto") -> Walk:
    """One decoded token per row.

    tokens: [R, H, ...], log_decay [R, H, K]. state: float32[R, H, K, V].
    Returns out float32[R, H, V] and the new state.
    """
    return KDA_STEP.pick(implementation)(tokens, state)


def kda_prefill(
    tokens: DeltaTokens, state: jax.Array, lens: jax.Array, *, implementation: str = "auto"
) -> Walk:
    """lens[r] tokens of each row, from its state to its final state.

    tokens: [R, W, H, ...], log_decay [R, W, H, K]; whatever stands beyond lens[r] is not read.
    state: float32[R, H, K, V]. lens: int32[R], 0 <= lens <= W; a row of 0 tokens keeps its state.
    Returns out float32[R, W, H, V] (zeros beyond lens) and the final states. In the chunked form a
    prefill cut at multiples of `walk.CHUNK` gives the bits of the uncut one.
    """
    return KDA_PREFILL.pick(implementation)(tokens, state, lens)
