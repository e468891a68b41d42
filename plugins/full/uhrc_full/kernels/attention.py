"""Causal attention over a paged KV pool (MHA, GQA, MQA): prefill and decode in one form.

The `xla` form walks the KV in blocks of `BLOCK_TOKENS` with the online softmax of Milakov and
Gimelshein (2018), accumulating in float32. Blocks start at multiples of their size, whatever a row
sees, and a block that is masked for a token leaves its accumulators bit for bit as they were. So a
token's result depends on neither the other rows, nor the width of the page table, nor where the
row's first block lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from uhrc_full.kernels import Kernel

if TYPE_CHECKING:
    from uhrc_full.pool import KVLayer

PAGED_ATTENTION = Kernel("paged_attention")
"""Implementations take (q, cache, view: PagedView, scale, sinks: float32[heads])."""
BLOCK_TOKENS = 128
"""KV tokens per step of the online softmax (more when the page is larger)."""
EVERYTHING = 2**31 - 1
"""A window that no token ever leaves."""
NO_SINK = -1e30
"""A sink logit that weighs nothing beside any real score. Finite: a softmax over nothing but such a
sink is 1 on it, and not NaN."""


class PagedView(NamedTuple):
    """What the new tokens of a step's rows see of a pool."""

    page_table: jax.Array
    """int32[R, P]: page p of row r holds its positions p * page_size and on."""
    kv_lens: jax.Array
    """int32[R] tokens of the row, the new ones included; at most P * page_size."""
    q_lens: jax.Array
    """int32[R] new tokens."""
    width: int
    """W, the tokens that the step has room for in each row."""
    window_tokens: int = EVERYTHING
    """How many tokens a new one sees, itself included."""

    @property
    def last_seen(self) -> jax.Array:
        """int32[R, W]: the positions of the new tokens, each the last that it sees."""
        return (self.kv_lens - self.q_lens)[:, None] + jnp.arange(self.width, dtype=jnp.int32)

    @property
    def first_seen(self) -> jax.Array:
        """int32[R, W]: the first position in each new token's window; column 0 is the row's."""
        return jnp.maximum(self.last_seen + 1 - self.window_tokens, 0)

    def masks(self, kv_positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(bool[R, W, S] which new token sees which of int32[R, S]; bool[R, S] whether one may)."""
        first, position = self.first_seen, kv_positions[:, None]
        may = (first[:, :1] <= kv_positions) & (kv_positions < self.kv_lens[:, None])
        sees = (first[..., None] <= position) & (position <= self.last_seen[..., None])
        return may[:, None] & sees, may

    def seen_pages(self, page_size: int, pages_per_block: int) -> jax.Array:
        """int32[R, n]: each row's pages from the first block it sees on, in whole blocks.

        n covers the window and the new tokens, not the context. Outside what the row sees, where
        the table may hold anything, its nearest seen page stands once more.
        """
        block = pages_per_block * page_size
        # A row sees window + W - 1 tokens at most; the worst begin with a block's last token.
        most_blocks = (self.window_tokens + self.width - 3) // block + 2
        blocks = min(-(-self.page_table.shape[1] // pages_per_block), most_blocks)
        first = self.first_seen[:, :1]
        entries = first // block * pages_per_block + jnp.arange(blocks * pages_per_block)
        last_page = jnp.maximum(self.kv_lens[:, None] - 1, 0) // page_size
        entries = jnp.clip(entries, first // page_size, last_page)
        return jnp.take_along_axis(self.page_table, entries, axis=1)


def paged_attention(
    q: jax.Array,
    cache: KVLayer,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    *,
    scale: float,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(scale * q k^T) v for every new token over its row's sequence so far.

    q: [R, W, heads, head_dim], heads a multiple of the cache's kv_heads; query head h reads kv head
    h // (heads / kv_heads).
    cache: one layer's pool, the new tokens already written.
    page_table: int32[R, P]; kv_lens: int32[R], new tokens included; q_lens: int32[R].
    New token w of row r sits at position kv_lens[r] - q_lens[r] + w and sees none beyond it.
    sinks: [heads], one more logit in each head's softmax that brings no value (StreamingLLM, Xiao
    et al. 2023, as gpt-oss learns it); None is no sink.
    Returns q's dtype [R, W, heads, head_dim]; columns w >= q_lens[r] are garbage but finite.
    Pool tokens outside the rows' sequences are never read as data (they may be NaN).
    """
    view = PagedView(page_table, kv_lens, q_lens, q.shape[1])
    return PAGED_ATTENTION.pick(implementation)(q, cache, view, scale, sink_logits(sinks, q))


def sink_logits(sinks: jax.Array | None, q: jax.Array) -> jax.Array:
    """float32[heads]: the sinks, or those that weigh nothing."""
    return jnp.full(q.shape[2], NO_SINK) if sinks is None else sinks.astype(jnp.float32)


@PAGED_ATTENTION.register("reference")
def gqa_reference(
    q: jax.Array, cache: KVLayer, view: PagedView, scale: float, sinks: jax.Array
) -> jax.Array:
    """Gathers each row's whole sequence and takes one softmax."""
    group = q.shape[2] // cache.token.heads

    def sequence(pool: jax.Array) -> jax.Array:
        tokens = _heads_first(cache.token.unpack(pool[view.page_table]))
        return jnp.repeat(tokens, group, axis=1)

    return attend_at_once(q, (sequence(cache.k), sequence(cache.v)), view, scale, sinks)


@PAGED_ATTENTION.register("xla")
def gqa_xla(
    q: jax.Array, cache: KVLayer, view: PagedView, scale: float, sinks: jax.Array
) -> jax.Array:
    """Loads blocks of pages; the query heads that share a kv head are one matrix."""
    rows, width, heads, dim = q.shape
    kv_heads = cache.token.heads
    grouped = q.reshape(rows, width, kv_heads, heads // kv_heads, dim).transpose(0, 2, 1, 3, 4)

    def load(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _heads_first(cache.token.unpack(cache.k[pages])), _heads_first(
            cache.token.unpack(cache.v[pages])
        )

    queries = grouped.astype(jnp.float32) * scale
    out = attend_by_blocks(queries, load, view, sinks.reshape(kv_heads, 1, -1))
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def _heads_first(tokens: jax.Array) -> jax.Array:
    """[R, pages, page_size, heads, d] -> [R, heads, pages * page_size, d]."""
    rows, pages, page_size, heads, dim = tokens.shape
    return tokens.reshape(rows, pages * page_size, heads, dim).transpose(0, 2, 1, 3)


def attend_at_once(
    q: jax.Array,
    kv: tuple[jax.Array, jax.Array],
    view: PagedView,
    scale: float,
    sinks: jax.Array,
) -> jax.Array:
    """One softmax over whole sequences: what the references of GQA and MLA share.

    q: [R, W, heads, dk]; kv: (k [R, heads, P * page_size, dk], v [R, heads, P * page_size, dv]),
    heads 1 when shared; sinks: float32[heads]. Returns q's dtype [R, W, heads, dv].
    """
    k, v = (each.astype(jnp.float32) for each in kv)
    kv_positions = jnp.broadcast_to(jnp.arange(k.shape[2]), (k.shape[0], k.shape[2]))
    visible, inside = view.masks(kv_positions)
    scores = jnp.einsum("rwhd,rhsd->rhws", q.astype(jnp.float32), k) * scale
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([sink, scores], axis=-1), axis=-1)[..., 1:]
    # 0 * NaN is NaN: what no token sees must not reach the product.
    values = jnp.where(inside[:, None, :, None], v, 0)
    return jnp.einsum("rhws,rhsd->rwhd", weights, values).astype(q.dtype)


def attend_by_blocks(
    q: jax.Array,
    load: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    view: PagedView,
    sinks: jax.Array | float = NO_SINK,
) -> jax.Array:
    """Online softmax over KV blocks; the one loop behind full and window attention, GQA and MLA.

    q: float32[R, H, W, n, dk], already scaled: the n queries of a token share each head's keys.
    load: int32[R, b] pages -> (k [R, H, b * page_size, dk], v [R, H, b * page_size, dv]). It is
    asked for the pages that a row sees and for no other (of a row of no tokens, its first).
    sinks: broadcasts to [R, H, W, n].
    Returns float32[R, H, W, n, dv]; a token that sees nothing gets zeros.
    """
    # One query axis: with two, XLA on CPU copies every block of keys transposed.
    shape, matrix = q.shape[:-1], q.reshape(*q.shape[:2], -1, q.shape[-1])
    page_size, value_dim = jax.eval_shape(load, view.page_table[:, :1])[1].shape[-2:]
    pages_per_block = max(1, BLOCK_TOKENS // page_size)
    block = pages_per_block * page_size
    first_block = view.first_seen[:, 0] // block
    table = view.seen_pages(page_size, pages_per_block)

    def attend(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = state
        k, v = load(jax.lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block, 1))
        start = (first_block + i)[:, None] * block
        visible, inside = view.masks(start + jnp.arange(block, dtype=jnp.int32))
        scores = jnp.einsum("rhmd,rhsd->rhms", matrix, k, preferred_element_type=jnp.float32)
        scores = scores.reshape(*shape, block)
        scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        fade = jnp.exp(top - new_top)
        # 0 * NaN is NaN: what no token sees must not reach the product.
        v = jnp.where(inside[:, None, :, None], v, 0).astype(jnp.float32)
        gained = jnp.einsum("rhms,rhsd->rhmd", weights.reshape(*matrix.shape[:3], block), v)
        gained = gained.reshape(acc.shape)
        return new_top, total * fade + weights.sum(axis=-1), acc * fade[..., None] + gained

    # As if the sink had been seen before the first block; NO_SINK fades to exactly zero there.
    top = jnp.broadcast_to(jnp.asarray(sinks, jnp.float32), shape)
    begin = (top, jnp.ones(shape), jnp.zeros((*shape, value_dim)))
    blocks = jnp.max((view.kv_lens + block - 1) // block - first_block)
    _, total, acc = jax.lax.fori_loop(0, blocks, attend, begin)
    return acc / total[..., None]
