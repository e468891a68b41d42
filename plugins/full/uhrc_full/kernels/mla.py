"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), absorbed, over a paged pool.

The pool keeps one latent row per token: the compressed KV (`kv_lora_rank` values), then the rotary
key shared by all heads. With kv_b_proj folded into the query and the output, every head attends
over the same latent rows, which are both the keys (whole) and the values (their first part).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from uhrc_full.kernels import Kernel
from uhrc_full.kernels.attention import blockwise_attention, query_positions

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
    return MLA_ATTENTION.pick(implementation)(q, cache, page_table, kv_lens, q_lens, scale)


@MLA_ATTENTION.register("reference")
def _reference(
    q: jax.Array,
    cache: LatentLayer,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    scale: float,
) -> jax.Array:
    """Gathers each row's whole sequence and takes one softmax."""
    rows, width = q.shape[:2]
    latent = cache.token.unpack(cache.latent[page_table])
    latent = latent.reshape(rows, -1, latent.shape[-1]).astype(jnp.float32)
    kv_positions = jnp.arange(latent.shape[1])
    inside = kv_positions < kv_lens[:, None]
    seen = kv_positions <= query_positions(width, kv_lens, q_lens)[..., None]
    visible = (inside[:, None] & seen)[:, None]  # [R, 1, W, S]
    scores = jnp.einsum("rwhd,rsd->rhws", q.astype(jnp.float32), latent) * scale
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    values = jnp.where(inside[..., None], latent, 0)[..., : cache.kv_lora_rank]
    return jnp.einsum("rhws,rsd->rwhd", weights, values).astype(q.dtype)


@MLA_ATTENTION.register("xla")
def _xla(
    q: jax.Array,
    cache: LatentLayer,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    scale: float,
) -> jax.Array:
    """All heads' queries as one matrix over the one latent head."""
    rows, width, heads, dim = q.shape
    queries = (q.astype(jnp.float32) * scale).reshape(rows, 1, width * heads, dim)
    positions = jnp.repeat(query_positions(width, kv_lens, q_lens), heads, axis=1)

    def load(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = cache.token.unpack(cache.latent[pages])
        tokens = tokens.reshape(rows, 1, -1, dim)
        return tokens, tokens[..., : cache.kv_lora_rank]

    page_size = cache.latent.shape[1]
    out = blockwise_attention(queries, load, page_table, page_size, (kv_lens, positions))
    return out.reshape(rows, width, heads, cache.kv_lora_rank).astype(q.dtype)
