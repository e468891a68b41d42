"""Slot to slot copy of whole states inside the pool: the clone of a copy-on-write hit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from uhrc_recurrent.kernels import Kernel

COPY_SLOTS = Kernel("copy_slots")


def copy_slots(
    buffers: Any, src: jax.Array, dst: jax.Array, *, implementation: str = "auto"
) -> Any:
    """The buffers with slot `src[i]` cloned into slot `dst[i]`, in *every* array.

    buffers: pytree of arrays [num_slots, ...] in their physical layout (temporal and conv, all
    layers), donated by the caller's jit and updated in place.
    src, dst: int32[N]. A pair with either side outside [0, num_slots) is a row without a source (or
    padding): it writes nothing and costs nothing. dst are distinct and none of them is a src.
    """
    return COPY_SLOTS.pick(implementation)(buffers, src, dst)


def _usable(buffers: Any, src: jax.Array, dst: jax.Array) -> jax.Array:
    num_slots = jax.tree.leaves(buffers)[0].shape[0]
    return (src >= 0) & (src < num_slots) & (dst >= 0) & (dst < num_slots)


@COPY_SLOTS.register("reference")
def _reference(buffers: Any, src: jax.Array, dst: jax.Array) -> Any:
    """One gather and one scatter an array; unusable pairs are dropped."""
    usable = _usable(buffers, src, dst)

    def copy(pool: jax.Array) -> jax.Array:
        rows = pool[jnp.where(usable, src, 0)]
        return pool.at[jnp.where(usable, dst, pool.shape[0])].set(rows, mode="drop")

    return jax.tree.map(copy, buffers)


@COPY_SLOTS.register("xla")
def _xla(buffers: Any, src: jax.Array, dst: jax.Array) -> Any:
    """A loop over the usable pairs alone: a padded row moves no bytes, and no rows pile up."""
    usable = _usable(buffers, src, dst)
    first = jnp.argsort(~usable, stable=True)
    src, dst = src[first], dst[first]

    def clone(i: jax.Array, buffers: Any) -> Any:
        def one(pool: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(pool, src[i], 1)
            return jax.lax.dynamic_update_slice_in_dim(pool, row, dst[i], 0)

        return jax.tree.map(one, buffers)

    return jax.lax.fori_loop(0, jnp.sum(usable), clone, buffers)
