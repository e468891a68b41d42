"""The gated delta rule, which KDA and GDN share; they differ in the width of the decay.

Per head, with S the state [K, V], a = exp(log_decay) per key channel (KDA) or one for all (GDN):

    S <- diag(a) S;   S <- S + beta k (v - S^T k)^T;   out = S^T q

q and k are L2-normalised here and q is scaled by K^-1/2, as the models do. The chunked form is the
WY/UT transform of "Gated Delta Networks" (arXiv 2412.06464) and "Kimi Linear" (arXiv 2510.26692).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_recurrent.kernels.walk import CHUNK, Walk, walk_chunks, walk_tokens

L2NORM_EPS = 1e-6
BLOCK = 8
"""Tokens of the blocks that a chunk's matrices grow from."""
MERGED_SIZES = (8, 16, 32)
"""Sizes of the neighbours that each merge joins."""
LOG_DECAY_MIN = -20.0
"""Inside a block: exp(-20) = 2e-9 is lost in float32 rounding, exp(4 * 20) does not overflow."""

matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
"""float32 products also where the hardware would round the factors to bfloat16."""


class DeltaTokens(NamedTuple):
    """What the projections, the convolution and the gates give for each token.

    `...` is R, W in a prefill and R in a decode step; any float dtype; the arithmetic is float32.
    """

    q: jax.Array
    """[..., H, K], not normalised."""
    k: jax.Array
    """[..., H, K], not normalised."""
    v: jax.Array
    """[..., H, V]."""
    log_decay: jax.Array
    """[..., H, K] (one per channel) or [..., H, 1]; <= 0."""
    beta: jax.Array
    """[..., H, 1], how much of the new value is written; in (0, 1) for a sigmoid gate."""


def delta_step(tokens: DeltaTokens, state: jax.Array) -> Walk:
    """One token: tokens [R, H, ...], state float32[R, H, K, V] -> (out [R, H, V], state)."""
    q, k, v, log_decay, beta = _prepare(tokens)
    state = state * jnp.exp(log_decay)[..., None]
    correction = beta * (v - jnp.sum(state * k[..., None], axis=-2))
    state = state + k[..., None] * correction[..., None, :]
    return jnp.sum(state * q[..., None], axis=-2), state


def delta_prefill_by_token(tokens: DeltaTokens, state: jax.Array, lens: jax.Array) -> Walk:
    """The readable form of a prefill: `delta_step` token after token."""
    return walk_tokens(delta_step, tokens, state, lens)


def delta_prefill_by_chunk(tokens: DeltaTokens, state: jax.Array, lens: jax.Array) -> Walk:
    """The fast form of a prefill: matrix products over chunks of 64 tokens."""
    return walk_chunks(_delta_chunk, tokens, state, lens)


def _prepare(tokens: DeltaTokens) -> DeltaTokens:
    """Float32, q and k of unit length, q scaled."""
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in tokens)
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2NORM_EPS) for x in (q, k))
    return DeltaTokens(q * q.shape[-1] ** -0.5, k, v, log_decay, beta)


class _Decays(NamedTuple):
    """exp of sums of log_decay within a chunk, [..., CHUNK, K or 1] each, one per token i."""

    since: jax.Array
    """From the chunk's start to i, inclusive."""
    until: jax.Array
    """After i, to the chunk's end."""
    seams: tuple[jax.Array, ...]
    """For each merge, between i and the seam of the two blocks merged: from the seam to i,
    inclusive, for i in the later block, after i to the seam in the earlier."""
    from_middle: jax.Array
    """From the middle of i's smallest block to i; for i before it, the inverse of the way back."""
    to_middle: jax.Array
    """1 / from_middle."""


def _delta_chunk(tokens: DeltaTokens, used: jax.Array, state: jax.Array) -> Walk:
    """One chunk, tokens [R, H, CHUNK, ...].

    With u_i the correction that token i writes: (I + L) u = beta (v - k~ S), where S is the state
    before the chunk, k~ the keys decayed from its start, and L the part of earlier tokens' writes
    that token i reads back.
    """
    del used  # zeros at padding write nothing and decay nothing
    q, k, v, log_decay, beta = _prepare(tokens)
    decays = _decays(log_decay)
    inverse, scores = _within_chunk(q, k, beta, decays)
    writes = matmul(inverse, beta * (v - matmul(k * decays.since, state)))
    out = matmul(q * decays.since, state) + matmul(scores, writes)
    kept = jnp.swapaxes(decays.since[..., -1:, :], -1, -2)
    return out, state * kept + matmul(jnp.swapaxes(k * decays.until, -1, -2), writes)


def _decays(log_decay: jax.Array) -> _Decays:
    """Every sum is of terms <= 0 and no difference of sums is taken, so nothing overflows and
    nothing cancels, however strong the decay; but for the pair around a block's middle, whose
    exponents reach +-4 * LOG_DECAY_MIN.
    """
    blocks = _blocks(log_decay)
    i, j = np.indices((BLOCK, BLOCK))
    head, tail = _sums(j <= i, blocks), _sums(j > i, blocks)
    # The same over whole blocks: from block i to the chunk's start or end, or to a merge's seam.
    later = np.stack([i >= 0, i < 0, *(i * BLOCK // size % 2 == 1 for size in MERGED_SIZES)])
    near = np.stack([j >= 0, j >= 0, *(i * BLOCK // s == j * BLOCK // s for s in MERGED_SIZES)])
    between = _sums(near & np.where(later, j < i, j > i), head[..., None, :, -1, :])
    later = later[:, :, :1].reshape(-1, *(1,) * (head.ndim - 3), BLOCK, 1, 1)
    sums = jnp.where(later, head, tail) + jnp.moveaxis(between, -3, 0)[..., None, :]
    half = BLOCK // 2
    signs = 1.0 * ((half <= j) & (j <= i)) - ((i < j) & (j < half))
    from_middle = _sums(signs, jnp.maximum(blocks, LOG_DECAY_MIN))
    exponents = jnp.concatenate([sums, jnp.stack([from_middle, -from_middle])])
    since, until, *seams, from_middle, to_middle = jnp.exp(exponents.reshape(-1, *log_decay.shape))
    return _Decays(since, until, tuple(seams), from_middle, to_middle)


def _within_chunk(
    q: jax.Array, k: jax.Array, beta: jax.Array, decays: _Decays
) -> tuple[jax.Array, jax.Array]:
    """What the tokens of one chunk are to each other; inputs [..., CHUNK, d].

    With a_ij = exp(sum of log_decay over (j, i]), [..., CHUNK, CHUNK] each:
    inverse = (I + L)^-1 where L_ij = beta_i k_i . (a_ij k_j) for j < i, and
    scores_ij = q_i . (a_ij k_j) for j <= i.

    Both grow from blocks of 8 tokens by merging neighbours, doubling the size three times:

        (I + L)^-1 of [[A, 0], [B, C]] = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]

    which keeps its accuracy where powers of L explode (equal keys, beta 1, no decay).
    """
    readers = jnp.stack([k * beta, q])
    blocks = _within_block(readers, k, decays)
    for size, decay in zip(MERGED_SIZES, decays.seams, strict=True):
        _, late = _halves(readers * decay, size)
        early, _ = _halves(k * decay, size)
        read_back, score = matmul(late, jnp.swapaxes(early, -1, -2))
        first, second = _halves(blocks, size)
        below = jnp.stack([-matmul(matmul(second[0], read_back), first[0]), score])
        upper = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
        blocks = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)
    inverse, scores = blocks[..., 0, :, :]
    return inverse, scores


def _within_block(readers: jax.Array, k: jax.Array, decays: _Decays) -> jax.Array:
    """inverse and scores of `_within_chunk` for its blocks of 8: [2, ..., 8, BLOCK, BLOCK]."""
    row, column = np.ogrid[:BLOCK, :BLOCK]
    late = _blocks(readers * decays.from_middle)
    read_back, scores = matmul(late, jnp.swapaxes(_blocks(k * decays.to_middle), -1, -2))
    inverse = jnp.eye(BLOCK) - jnp.where((row % 2 == 1) & (column == row - 1), read_back, 0)
    for size in (2, 4):
        seam = (row // size % 2 == 1) & (column // size == row // size - 1)
        inverse -= matmul(matmul(inverse, jnp.where(seam, read_back, 0)), inverse)
    return jnp.stack([inverse, jnp.where(column <= row, scores, 0)])


def _sums(weights: np.ndarray, terms: jax.Array) -> jax.Array:
    """weights [..., n, m] times terms [..., m, d], as a matrix product."""
    factor = jnp.asarray(weights, jnp.float32)
    lead = jnp.broadcast_shapes(factor.shape[:-2], terms.shape[:-2])
    return matmul(jnp.broadcast_to(factor, (*lead, *factor.shape[-2:])), terms)


def _blocks(x: jax.Array) -> jax.Array:
    """[..., CHUNK, d] -> [..., CHUNK / BLOCK, BLOCK, d]."""
    return x.reshape(*x.shape[:-2], CHUNK // BLOCK, BLOCK, x.shape[-1])


def _halves(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The even and the odd blocks of `size` tokens, [..., n, size, d] each.

    x: [..., CHUNK, d], or the blocks so far [..., 2 n, size, d].
    """
    lead = x.shape[:-2] if x.shape[-2] == CHUNK else x.shape[:-3]
    pairs = x.reshape(*lead, CHUNK // (2 * size), 2, size, x.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]
