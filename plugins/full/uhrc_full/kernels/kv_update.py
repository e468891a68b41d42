"""Scatter of new tokens' rows into a paged pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from uhrc_full.kernels import Kernel

KV_UPDATE = Kernel("kv_update")


def kv_update(
    pool: jax.Array, rows: jax.Array, token_indices: jax.Array, *, implementation: str = "auto"
) -> jax.Array:
    """The pool with `rows[i]` stored at token `token_indices[i]`; every other byte unchanged.

    pool: dtype[pages, page_size, ...] in its physical layout; donated by the caller's jit.
    rows: [N, ...] with the pool's trailing shape; cast to the pool's dtype.
    token_indices: int32[N], distinct. An index outside [0, pages * page_size) is a padding row and
    writes nothing (it is dropped, never clipped).
    """
    return KV_UPDATE.pick(implementation)(pool, rows, token_indices)


@KV_UPDATE.register("reference")
def _reference(pool: jax.Array, rows: jax.Array, token_indices: jax.Array) -> jax.Array:
    """One token after the other."""
    page_size = pool.shape[1]
    num_tokens = pool.shape[0] * page_size

    def store(pool: jax.Array, new: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        row, index = new
        at = (index // page_size, index % page_size)
        stored = pool.at[at].set(row.astype(pool.dtype))
        return jnp.where((index >= 0) & (index < num_tokens), stored, pool), None

    return jax.lax.scan(store, pool, (rows, token_indices))[0]


@KV_UPDATE.register("xla")
def _xla(pool: jax.Array, rows: jax.Array, token_indices: jax.Array) -> jax.Array:
    """One scatter over the pool seen as a list of tokens (a bitcast: pages are contiguous)."""
    tokens = pool.reshape(-1, *pool.shape[2:])
    # A negative index would count from the end: send it beyond the end, where it is dropped.
    indices = jnp.where(token_indices < 0, tokens.shape[0], token_indices)
    tokens = tokens.at[indices].set(rows.astype(pool.dtype), mode="drop", unique_indices=True)
    return tokens.reshape(pool.shape)
