"""Grouped-query attention over the paged pool; what comes before and after is each model's own."""

from __future__ import annotations

from typing import Any

import jax

from uhrc_engine.models.contract import StepInputs
from uhrc_full.kernels.attention import paged_attention


def gqa_attend(
    qkv: tuple[jax.Array, jax.Array, jax.Array], cache: Any, inputs: StepInputs, scale: float
) -> tuple[jax.Array, Any]:
    """Writes the new keys and values, and attends.

    qkv: q [R, W, heads, head_dim], k and v [R, W, kv_heads, head_dim], rotated. cache: the layer's
    `uhrc_full.pool.KVLayer`, of the full pool. Returns [R, W, heads * head_dim] and the cache
    written.
    """
    q, k, v = qkv
    places = inputs.places["full"]
    token = (-1, *k.shape[2:])
    cache = cache.write(k.reshape(token), v.reshape(token), places.write_indices.reshape(-1))
    attended = paged_attention(
        q, cache, places.page_table, inputs.kv_lens, inputs.q_lens, scale=scale
    )
    return attended.reshape(*q.shape[:2], -1), cache
