"""Causal attention over a paged KV pool (MHA, GQA, MQA): prefill and decode in one form.

The `xla` form walks the KV in blocks of `BLOCK_TOKENS` with the online softmax of Milakov and
Gimelshein (2018), accumulating in float32. Its trip count follows the longest row of the step, and
a block that is masked for a row leaves that row's accumulators bit for bit as they were. So a row's
result depends on neither the other rows nor the width of the page table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from uhrc_full.kernels import Kernel

if TYPE_CHECKING:
    from uhrc_full.pool import KVLayer

PAGED_ATTENTION = Kernel("paged_attention")
BLOCK_TOKENS = 128
"""KV tokens per step of the online softmax (more when the page is larger)."""
_LOWEST = -1e30
"""Start of the running maximum: finite, so that a wholly masked block rescales by exp(0) == 1."""


def paged_attention(
    q: jax.Array,
    cache: KVLayer,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    *,
    scale: float,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(scale * q k^T) v for every new token over its row's sequence so far.

    q: [R, W, heads, head_dim], heads a multiple of the cache's kv_heads; query head h reads kv head
    h // (heads / kv_heads).
    cache: one layer's pool, the new tokens already written.
    page_table: int32[R, P]; kv_lens: int32[R], new tokens included; q_lens: int32[R].
    New token w of row r sits at position kv_lens[r] - q_lens[r] + w and sees none beyond it.
    Returns q's dtype [R, W, heads, head_dim]; columns w >= q_lens[r] are garbage but finite.
    Pool tokens outside the rows' sequences are never read as data (they may be NaN).
    """
    return PAGED_ATTENTION.pick(implementation)(q, cache, page_table, kv_lens, q_lens, scale)


def query_positions(width: int, kv_lens: jax.Array, q_lens: jax.Array) -> jax.Array:
    """int32[R, W] absolute positions of the new tokens."""
    return (kv_lens - q_lens)[:, None] + jnp.arange(width, dtype=jnp.int32)


@PAGED_ATTENTION.register("reference")
def _reference(
    q: jax.Array,
    cache: KVLayer,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    scale: float,
) -> jax.Array:
    """Gathers each row's whole sequence and takes one softmax."""
    rows, width, heads, _ = q.shape
    page_size = cache.k.shape[1]

    def sequence(pool: jax.Array) -> jax.Array:  # float32[R, P * page_size, heads, dim]
        tokens = cache.token.unpack(pool[page_table])
        tokens = tokens.reshape(rows, -1, *tokens.shape[3:]).astype(jnp.float32)
        return jnp.repeat(tokens, heads // tokens.shape[2], axis=2)

    kv_positions = jnp.arange(page_table.shape[1] * page_size)
    inside = kv_positions < kv_lens[:, None]
    seen = kv_positions <= query_positions(width, kv_lens, q_lens)[..., None]
    visible = (inside[:, None] & seen)[:, None]  # [R, 1, W, S]
    scores = jnp.einsum("rwhd,rshd->rhws", q.astype(jnp.float32), sequence(cache.k)) * scale
    weights = jax.nn.softmax(jnp.where(visible, scores, _LOWEST), axis=-1)
    values = jnp.where(inside[..., None, None], sequence(cache.v), 0)
    return jnp.einsum("rhws,rshd->rwhd", weights, values).astype(q.dtype)


@PAGED_ATTENTION.register("xla")
def _xla(
    q: jax.Array,
    cache: KVLayer,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    scale: float,
) -> jax.Array:
    rows, width, heads, dim = q.shape
    kv_heads = cache.token.heads
    # [R, kv_heads, W * group, d]: the queries that share a kv head are one matrix.
    grouped = q.reshape(rows, width, kv_heads, heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(rows, kv_heads, -1, dim).astype(jnp.float32) * scale
    positions = jnp.repeat(query_positions(width, kv_lens, q_lens), heads // kv_heads, axis=1)

    def load(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _heads_first(cache.token.unpack(cache.k[pages])), _heads_first(
            cache.token.unpack(cache.v[pages])
        )

    out = blockwise_attention(grouped, load, page_table, cache.k.shape[1], (kv_lens, positions))
    out = out.reshape(rows, kv_heads, width, heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(rows, width, heads, dim).astype(q.dtype)


def _heads_first(tokens: jax.Array) -> jax.Array:
    """[R, pages, page_size, heads, d] -> [R, heads, pages * page_size, d]."""
    rows, pages, page_size, heads, dim = tokens.shape
    return tokens.reshape(rows, pages * page_size, heads, dim).transpose(0, 2, 1, 3)


def blockwise_attention(
    q: jax.Array,
    load: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    page_table: jax.Array,
    page_size: int,
    spans: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Online softmax over KV blocks; the one loop behind GQA and MLA.

    q: float32[R, H, M, dk], already scaled: M queries share the H heads' keys.
    load: int32[R, n] pages -> (k [R, H, n * page_size, dk], v [R, H, n * page_size, dv]).
    spans: (kv_lens int32[R], positions int32[R, M] of the queries).
    Returns float32[R, H, M, dv]; a row with kv_len 0 gives zeros.
    """
    kv_lens, positions = spans
    pages_per_block = max(1, BLOCK_TOKENS // page_size)
    block = pages_per_block * page_size
    # A block must not run over the table's end: dynamic_slice would shift it back silently.
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_per_block)))

    def attend(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        pages = jax.lax.dynamic_slice_in_dim(page_table, i * pages_per_block, pages_per_block, 1)
        k, v = load(pages)
        kv_positions = i * block + jnp.arange(block, dtype=jnp.int32)
        inside = kv_positions < kv_lens[:, None]
        visible = inside[:, None] & (kv_positions <= positions[..., None])
        scores = jnp.einsum("rhmd,rhsd->rhms", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(visible[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        fade = jnp.exp(top - new_top)
        # 0 * NaN is NaN: what lies outside the sequence must not reach the product.
        v = jnp.where(inside[:, None, :, None], v, 0).astype(jnp.float32)
        gained = jnp.einsum("rhms,rhsd->rhmd", weights, v)
        return new_top, total * fade + weights.sum(axis=-1), acc * fade[..., None] + gained

    shape = q.shape[:-1]
    value_dim = jax.eval_shape(load, page_table[:, :pages_per_block])[1].shape[-1]
    start = (
        jnp.full(shape, _LOWEST),
        jnp.zeros(shape),
        jnp.zeros((*shape, value_dim)),
    )
    blocks = (kv_lens.max() + block - 1) // block
    _, total, acc = jax.lax.fori_loop(0, blocks, attend, start)
    return acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
