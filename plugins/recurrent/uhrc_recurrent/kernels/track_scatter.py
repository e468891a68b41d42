"""Rows of a step in and out of the slots: gather, scatter, masked scatter to track slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from uhrc_recurrent.kernels import Kernel

SCATTER_SLOTS = Kernel("scatter_slots")


def gather_slots(pool: jax.Array, slots: jax.Array) -> jax.Array:
    """dtype[R, ...]: the slots int32[R] of pool [num_slots, ...]; zeros for one out of range."""
    return pool.at[_beyond_if_negative(pool, slots)].get(mode="fill", fill_value=0)


def scatter_slots(
    pool: jax.Array, rows: jax.Array, slots: jax.Array, *, implementation: str = "auto"
) -> jax.Array:
    """The pool with `rows[r]` stored in slot `slots[r]`; every other byte unchanged.

    pool: dtype[num_slots, ...] in its physical layout; donated by the caller's jit.
    rows: [R, ...] with the pool's trailing shape and dtype.
    slots: int32[R], distinct where in range. One outside [0, num_slots) is a padded row and writes
    nothing (it is dropped, never clipped).
    """
    return SCATTER_SLOTS.pick(implementation)(pool, rows, slots)


def track_scatter(
    pool: jax.Array,
    rows: jax.Array,
    track_slots: jax.Array,
    mask: jax.Array,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """`scatter_slots` of the rows whose bool[R] mask is set; the others write nothing at all.

    Those are the rows that end this step on a track boundary; `rows` are their final states.
    """
    slots = jnp.where(mask, track_slots, pool.shape[0])
    return scatter_slots(pool, rows, slots, implementation=implementation)


def _beyond_if_negative(pool: jax.Array, slots: jax.Array) -> jax.Array:
    """A negative index would count from the end: send it beyond the end, where it is dropped."""
    return jnp.where(slots < 0, pool.shape[0], slots)


@SCATTER_SLOTS.register("reference")
def _reference(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """One row after the other."""

    def store(pool: jax.Array, new: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        row, slot = new
        in_range = (slot >= 0) & (slot < pool.shape[0])
        return jnp.where(in_range, pool.at[slot].set(row), pool), None

    return jax.lax.scan(store, pool, (rows, slots))[0]


@SCATTER_SLOTS.register("xla")
def _xla(pool: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    at = _beyond_if_negative(pool, slots)
    return pool.at[at].set(rows, mode="drop", unique_indices=True)
