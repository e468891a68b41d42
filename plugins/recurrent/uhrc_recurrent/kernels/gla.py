"""Lightning attention (GLA with a constant decay per head): S <- a S + k v^T; out = scale S^T q.

Models: MiniMax-Text-01 (scale 1), Ling/Ring 2.5 (scale K^-1/2). Formulas: arXiv 2401.04658. The
decay is no weight: it follows from the head and the layer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from uhrc_recurrent.kernels import Kernel
from uhrc_recurrent.kernels.delta import matmul
from uhrc_recurrent.kernels.walk import CHUNK, Walk, walk_chunks, walk_tokens

GLA_STEP = Kernel("gla_step")
GLA_PREFILL = Kernel("gla_prefill")


class GLATokens(NamedTuple):
    """q, k [..., H, K] and v [..., H, V]; `...` is R, W in a prefill and R in a decode step.

    The caller has applied activation, norm, rotation and scale; any float dtype, float32 inside.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array


def minimax_log_decay(num_heads: int, layer_idx: int, num_layers: int) -> jax.Array:
    """float32[H] of one MiniMax layer: -2^(-8 (h + 1) / H) times the layer's factor.

    layer_idx counts all `num_layers` decoder layers from 0.
    """
    factor = 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5
    return -jnp.asarray([2 ** (-8 * (h + 1) / num_heads) * factor for h in range(num_heads)])


def bailing_log_decay(num_heads: int, layer_idx: int, num_layers: int) -> jax.Array:
    """float32[H] of one Ling/Ring 2.5 layer: minus the ALiBi slopes times the layer's factor.

    The published code counts layers from 1 here, so layer 0 has a factor above 1.
    """
    factor = 1 - (layer_idx - 1) / (num_layers - 1) + 1e-5
    return -jnp.asarray([slope * factor for slope in _alibi_slopes(num_heads)])


def _alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8 h / H) for H a power of two; for others, those of the power below, then every second
    one of the power above (arXiv 2108.12409)."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2 ** (-4 * h / power) for h in range(1, 2 * (num_heads - power), 2)]


def gla_step(
    tokens: GLATokens, log_decay: jax.Array, state: jax.Array, *, implementation: str = "auto"
) -> Walk:
    """One decoded token per row.

    tokens: [R, H, ...]. log_decay: float32[H], <= 0. state: float32[R, H, K, V].
    Returns out float32[R, H, V] and the new state.
    """
    return GLA_STEP.pick(implementation)(tokens, log_decay, state)


def gla_prefill(
    tokens: GLATokens,
    log_decay: jax.Array,
    state: jax.Array,
    lens: jax.Array,
    *,
    implementation: str = "auto",
) -> Walk:
    """lens[r] tokens of each row, from its state to its final state.

    tokens: [R, W, H, ...]; whatever stands beyond lens[r] is not read. log_decay: float32[H], <= 0.
    state: float32[R, H, K, V]. lens: int32[R], 0 <= lens <= W; a row of 0 tokens keeps its state.
    Returns out float32[R, W, H, V] (zeros beyond lens) and the final states. In the chunked form a
    prefill cut at multiples of `walk.CHUNK` gives the bits of the uncut one.
    """
    return GLA_PREFILL.pick(implementation)(tokens, log_decay, state, lens)


@GLA_STEP.register("reference", "xla")
def _step(tokens: GLATokens, log_decay: jax.Array, state: jax.Array) -> Walk:
    q, k, v = (x.astype(jnp.float32) for x in tokens)
    state = state * jnp.exp(log_decay)[:, None, None] + k[..., None] * v[..., None, :]
    return jnp.sum(state * q[..., None], axis=-2), state


@GLA_PREFILL.register("reference")
def _by_token(tokens: GLATokens, log_decay: jax.Array, state: jax.Array, lens: jax.Array) -> Walk:
    return walk_tokens(lambda token, state: _step(token, log_decay, state), tokens, state, lens)


@GLA_PREFILL.register("xla")
def _by_chunk(tokens: GLATokens, log_decay: jax.Array, state: jax.Array, lens: jax.Array) -> Walk:
    per_head = log_decay[:, None, None]
    position = jnp.arange(CHUNK)
    distance = position[:, None] - position
    decay = jnp.where(distance < 0, 0, jnp.exp(per_head * jnp.maximum(distance, 0)))
    since = jnp.exp(per_head * (position[:, None] + 1))

    def chunk(piece: GLATokens, used: jax.Array, state: jax.Array) -> Walk:
        q, k, v = piece
        within = matmul(matmul(q, jnp.swapaxes(k, -1, -2)) * decay, v)
        out = matmul(q * since, state) + within
        used = used[:, None, None, None]
        # Padding keys are zero: the clip only keeps exp from overflowing on them.
        until = jnp.exp(per_head * jnp.maximum(used - 1 - position[:, None], 0))
        new = matmul(jnp.swapaxes(k * until, -1, -2), v)
        return out, state * jnp.exp(per_head * used) + new

    return walk_chunks(chunk, tokens, state, lens)
