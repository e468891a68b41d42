"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), absorbed, over a paged pool.

The pool keeps one latent row per token: the compressed KV (`kv_lora_rank` values), then the rotary
key shared by all heads. With kv_b_proj folded into the query and the output, every head attends
over the same latent rows, which are both the keys (whole) and the values (their first part).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from uhrc_full.kernels import Kernel
from uhrc_full.kernels.attention import (
    PagedView,
    attend_at_once,
    attend_by_blocks,
    sink_logits,
)

if TYPE_CHECKING:
    from uhrc_full.pool import LatentLayer

MLA_ATTENTION = Kernel("mla_attention")


def mla_attention(
    q: jax.Array,
    cache: LatentLayer,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    *,
    scale: float,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(scale * q latent^T) latent[:kv_lora_rank] for every new token; prefill and decode.

    q: [R, W, heads, kv_lora_rank + qk_rope_head_dim]: the absorbed query, then the rotary one.
    cache: one layer's latent pool, the new tokens already written.
    page_table, kv_lens, q_lens, causality, padding: as in `paged_attention`.
    Returns q's dtype [R, W, heads, kv_lora_rank], to be multiplied by each head's value half of
    kv_b_proj.
    """
    view = PagedView(page_table, kv_lens, q_lens, q.shape[1])
    return MLA_ATTENTION.pick(implementation)(q, cache, view, scale)


@MLA_ATTENTION.register("reference")
def _reference(q: jax.Array, cache: LatentLayer, view: PagedView, scale: float) -> jax.Array:
    """Gathers each row's whole sequence and takes one softmax."""
    k, v = _head(cache, view.page_table)
    return attend_at_once(q, (k, v), view, scale, sink_logits(None, q))


@MLA_ATTENTION.register("xla")
def _xla(q: jax.Array, cache: LatentLayer, view: PagedView, scale: float) -> jax.Array:
    """All heads' queries as one matrix over the one latent head."""
    queries = (q.astype(jnp.float32) * scale)[:, None]
    return attend_by_blocks(queries, partial(_head, cache), view)[:, 0].astype(q.dtype)


def _head(cache: LatentLayer, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32[R, n] pages -> (k [R, 1, n * page_size, latent_dim], v the same, kv_lora_rank)."""
    latent = cache.token.unpack(cache.latent[pages])
    latent = latent.reshape(pages.shape[0], 1, -1, latent.shape[-1])
    return latent, latent[..., : cache.kv_lora_rank]
