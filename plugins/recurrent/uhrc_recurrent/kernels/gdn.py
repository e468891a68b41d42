"""Gated DeltaNet (GDN): the delta rule with one decay per value head.

Models: Qwen3-Next, Qwen3.5. Formulas: arXiv 2412.06464.
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

GDN_STEP = Kernel("gdn_step")
GDN_PREFILL = Kernel("gdn_prefill")


def gdn_log_decay(x: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """The gate: float32[..., HV, 1] log decay = -exp(a_log) softplus(x + dt_bias).

    x: [..., HV] from the projection. a_log, dt_bias: [HV].
    """
    rate = jnp.exp(a_log.astype(jnp.float32))
    biased = x.astype(jnp.float32) + dt_bias.astype(jnp.float32)
    return (-rate * jax.nn.softplus(biased))[..., None]


def gdn_step(tokens: DeltaTokens, state: jax.Array, *, implementation: str = "auto") -> Walk:
    """One decoded token per row.

    tokens: q, k [R, HK, K]; v [R, HV, V], log_decay and beta [R, HV, 1]; HV is a multiple of HK and
    key head h serves the value heads h * HV / HK and up. state: float32[R, HV, K, V].
    Returns out float32[R, HV, V] and the new state.
    """
    return GDN_STEP.pick(implementation)(tokens, state)


def gdn_prefill(
    tokens: DeltaTokens, state: jax.Array, lens: jax.Array, *, implementation: str = "auto"
) -> Walk:
    """lens[r] tokens of each row, from its state to its final state.

    tokens: [R, W, heads, ...] with the heads of `gdn_step`; else as `kda.kda_prefill`.
    """
    return GDN_PREFILL.pick(implementation)(tokens, state, lens)


@GDN_STEP.register("reference", "xla")
def _step(tokens: DeltaTokens, state: jax.Array) -> Walk:
    return delta_step(_expand(tokens), state)


@GDN_PREFILL.register("reference")
def _by_token(tokens: DeltaTokens, state: jax.Array, lens: jax.Array) -> Walk:
    return delta_prefill_by_token(_expand(tokens), state, lens)


@GDN_PREFILL.register("xla")
def _by_chunk(tokens: DeltaTokens, state: jax.Array, lens: jax.Array) -> Walk:
    return delta_prefill_by_chunk(_expand(tokens), state, lens)


def _expand(tokens: DeltaTokens) -> DeltaTokens:
    """Each key head repeated for its value heads."""
    repeats = tokens.v.shape[-2] // tokens.k.shape[-2]
    q, k = (jnp.repeat(x, repeats, axis=-2) for x in (tokens.q, tokens.k))
    return tokens._replace(q=q, k=k)
