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


def _delta_chunk(tokens: DeltaTokens, used: jax.Array, state: jax.Array) -> Walk:
    """One chunk, tokens [R, H, CHUNK, ...].

    With u_i the correction that token i writes: (I + L) u = beta (v - k~ S), where S is the state
    before the chunk, k~ the keys decayed from its start, and L the part of earlier tokens' writes
    that token i reads back.
    """
    del used  # zeros at padding write nothing and decay nothing
    q, k, v, log_decay, beta = _prepare(tokens)
    inverse, scores = _within_chunk(q, k, log_decay, beta)
    since, until = (jnp.exp(x) for x in _decay_within(log_decay, CHUNK))
    writes = matmul(inverse, beta * (v - matmul(k * since, state)))
    out = matmul(q * since, state) + matmul(scores, writes)
    kept = jnp.swapaxes(since[..., -1:, :], -1, -2)
    return out, state * kept + matmul(jnp.swapaxes(k * until, -1, -2), writes)


def _within_chunk(
    q: jax.Array, k: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the tokens of one chunk are to each other; inputs [..., CHUNK, d], d = K or 1.

    With a_ij = exp(sum of log_decay over (j, i]), [..., CHUNK, CHUNK] each:
    inverse = (I + L)^-1 where L_ij = beta_i k_i . (a_ij k_j) for j < i, and
    scores_ij = q_i . (a_ij k_j) for j <= i.

    Everything grows from blocks of 8 tokens by merging neighbours, doubling the size three times:

        (I + L)^-1 of [[A, 0], [B, C]] = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]

    which keeps its accuracy where powers of L explode (equal keys, beta 1, no decay). In a merge
    all decays are counted from the seam, so every exponent is a sum of terms <= 0: nothing
    overflows and nothing cancels, however strong the decay.
    """
    inverse, scores = _within_block(*(_blocks(x) for x in (q, k, log_decay, beta)))
    size = BLOCK
    while size < CHUNK:
        (_, q_late), (k_early, k_late), (_, beta_late) = (_halves(x, size) for x in (q, k, beta))
        since, until = _decay_within(log_decay, size)
        (until_early, _), (_, since_late) = _halves(until, size), _halves(since, size)
        decayed = jnp.exp(since_late)
        late = jnp.concatenate([k_late * beta_late * decayed, q_late * decayed], axis=-2)
        early = jnp.swapaxes(k_early * jnp.exp(until_early), -1, -2)
        read_back, score = jnp.split(matmul(late, early), 2, axis=-2)
        first, second = _halves(inverse, size)
        inverse = _merge((first, second), -matmul(matmul(second, read_back), first))
        scores = _merge(_halves(scores, size), score)
        size *= 2
    return inverse[..., 0, :, :], scores[..., 0, :, :]


def _decay_within(log_decay: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Sums of log_decay [..., CHUNK, d] from the start of a token's block of `size` tokens to the
    token (inclusive), and from after it to the block's end: sums of like signs, no differences."""
    blocks = _blocks(log_decay)
    i, j = np.ogrid[:BLOCK, :BLOCK]
    same = i // (size // BLOCK) == j // (size // BLOCK)
    totals = jnp.sum(blocks, axis=-2)
    before, after = (
        jnp.sum(jnp.where((same & picked)[..., None], totals[..., None, :, :], 0), axis=-2)
        for picked in (j < i, j > i)
    )
    since = _sums(blocks, j <= i) + before[..., None, :]
    until = _sums(blocks, j > i) + after[..., None, :]
    return since.reshape(log_decay.shape), until.reshape(log_decay.shape)


def _within_block(
    q: jax.Array, k: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """inverse and scores of `_within_chunk` for single blocks [..., BLOCK, d]: [..., BLOCK, BLOCK].

    Decays are counted from the block's middle, so exponents reach +-4 * LOG_DECAY_MIN.
    """
    row, column = np.ogrid[:BLOCK, :BLOCK]
    since = _sums(jnp.maximum(log_decay, LOG_DECAY_MIN), column <= row)
    from_middle = since - since[..., BLOCK // 2 - 1 : BLOCK // 2, :]
    decayed = jnp.exp(from_middle)
    late = jnp.concatenate([k * beta * decayed, q * decayed], axis=-2)
    early = jnp.swapaxes(k * jnp.exp(-from_middle), -1, -2)
    read_back, scores = jnp.split(matmul(late, early), 2, axis=-2)
    inverse = jnp.eye(BLOCK) - jnp.where(
        column == row - 1, jnp.where(row % 2 == 1, read_back, 0), 0
    )
    for size in (2, 4):
        seam = (row // size % 2 == 1) & (column // size == row // size - 1)
        below = jnp.where(seam, read_back, 0)
        inverse = inverse - matmul(matmul(inverse, below), inverse)
    return inverse, jnp.where(column <= row, scores, 0)


def _sums(blocks: jax.Array, picked: np.ndarray) -> jax.Array:
    """[..., BLOCK, d]: for each token of a block the sum over the tokens picked in its row."""
    weights = jnp.asarray(picked, jnp.float32)
    return matmul(jnp.broadcast_to(weights, (*blocks.shape[:-2], BLOCK, BLOCK)), blocks)


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


def _merge(blocks: tuple[jax.Array, jax.Array], below: jax.Array) -> jax.Array:
    """[[A, 0], [below, C]] of the blocks A, C: [..., n, size, size] -> [..., n, 2 size, 2 size]."""
    upper = jnp.concatenate([blocks[0], jnp.zeros_like(below)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([below, blocks[1]], axis=-1)], axis=-2)
