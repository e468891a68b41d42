"""The recurrence of Mamba-2, state space duality (SSD): one decay per head and token.

Per head, with S the state [P, N], and b and c those of the head's group:

    S <- exp(dt a) S + (dt x) b^T;   out = S c

Formulas: arXiv 2405.21060; the chunked form is that of its section 6. The skip term D x is left to
the layer.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from uhrc_recurrent.kernels import Kernel
from uhrc_recurrent.kernels.walk import CHUNK, Walk, walk_chunks, walk_tokens

MAMBA2_STEP = Kernel("mamba2_step")
MAMBA2_PREFILL = Kernel("mamba2_prefill")

_matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class SSDTokens(NamedTuple):
    """What the projection, the convolution and the softplus give for each token.

    `...` is R, W in a prefill and R in a decode step; any float dtype; the arithmetic is float32.
    H is a multiple of G, and group g serves the heads g * H / G and up.
    """

    x: jax.Array
    """[..., H, P]."""
    dt: jax.Array
    """[..., H, 1], >= 0."""
    b: jax.Array
    """[..., G, N]."""
    c: jax.Array
    """[..., G, N]."""


def mamba2_step(
    tokens: SSDTokens, a: jax.Array, state: jax.Array, *, implementation: str = "auto"
) -> Walk:
    """One decoded token per row.

    tokens: [R, H or G, ...]. a: float32[H], <= 0. state: float32[R, H, P, N].
    Returns out float32[R, H, P] and the new state.
    """
    return MAMBA2_STEP.pick(implementation)(tokens, a, state)


def mamba2_prefill(
    tokens: SSDTokens,
    a: jax.Array,
    state: jax.Array,
    lens: jax.Array,
    *,
    implementation: str = "auto",
) -> Walk:
    """lens[r] tokens of each row, from its state to its final state.

    tokens: [R, W, H or G, ...]; whatever stands beyond lens[r] is not read. a: float32[H], <= 0.
    state: float32[R, H, P, N]. lens: int32[R], 0 <= lens <= W; a row of 0 tokens keeps its state.
    Returns out float32[R, W, H, P] (zeros beyond lens) and the final states. In the chunked form a
    prefill cut at multiples of `walk.CHUNK` gives the bits of the uncut one.
    """
    return MAMBA2_PREFILL.pick(implementation)(tokens, a, state, lens)


@MAMBA2_STEP.register("reference", "xla")
def _step(tokens: SSDTokens, a: jax.Array, state: jax.Array) -> Walk:
    x, dt, b, c = (part.astype(jnp.float32) for part in tokens)
    b, c = (_per_head(part, x.shape[-2]) for part in (b, c))
    decay = jnp.exp(dt * a[:, None])[..., None]
    state = state * decay + (dt * x)[..., None] * b[..., None, :]
    return jnp.sum(state * c[..., None, :], axis=-1), state


@MAMBA2_PREFILL.register("reference")
def _by_token(tokens: SSDTokens, a: jax.Array, state: jax.Array, lens: jax.Array) -> Walk:
    return walk_tokens(lambda token, state: _step(token, a, state), tokens, state, lens)


@MAMBA2_PREFILL.register("xla")
def _by_chunk(tokens: SSDTokens, a: jax.Array, state: jax.Array, lens: jax.Array) -> Walk:
    """The walk takes a state's last axis for the width of the output, so it gets [R, H, N, P]."""

    def chunk(piece: SSDTokens, used: jax.Array, state: jax.Array) -> Walk:
        del used  # zeros at padding write nothing and decay nothing
        return _chunk(piece, a, state)

    out, state = walk_chunks(chunk, tokens, jnp.swapaxes(state, -1, -2), lens)
    return out, jnp.swapaxes(state, -1, -2)


def _chunk(tokens: SSDTokens, a: jax.Array, state: jax.Array) -> Walk:
    """One chunk, tokens [R, H or G, CHUNK, ...]; state [R, H, N, P].

    What token i reads of token j <= i is c_i . b_j times the decay over (j, i], and of the state
    before the chunk, c_i S times the decay from the chunk's start.
    """
    x, dt, b, c = tokens
    heads = x.shape[1]
    log_decay = dt[..., 0] * a[:, None]
    between = _decay_between(log_decay)
    since = jnp.exp(jnp.cumsum(log_decay, axis=-1))[..., None]
    until = between[..., -1, :, None]
    writes = dt * x
    scores = _per_head(_matmul(c, jnp.swapaxes(b, -1, -2)), heads, axis=1) * between
    b, c = (_per_head(part, heads, axis=1) for part in (b, c))
    out = _matmul(scores, writes) + _matmul(c, state) * since
    new = _matmul(jnp.swapaxes(b * until, -1, -2), writes)
    return out, state * since[..., -1:, :] + new


def _decay_between(log_decay: jax.Array) -> jax.Array:
    """exp of the sum of log_decay [..., CHUNK] over (j, i], at [..., i, j]; 0 for j > i.

    Each is a sum of its own terms, all <= 0, and no difference of sums: a strong decay in the chunk
    takes no accuracy from the weak ones.
    """
    i, j = jnp.ogrid[:CHUNK, :CHUNK]
    terms = jnp.where(i > j, log_decay[..., :, None], 0)
    return jnp.where(i >= j, jnp.exp(jnp.cumsum(terms, axis=-2)), 0)


def _per_head(x: jax.Array, heads: int, axis: int = -2) -> jax.Array:
    """Each group repeated along `axis` for the heads it serves."""
    return jnp.repeat(x, heads // x.shape[axis], axis=axis)
