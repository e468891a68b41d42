"""Walking a padded batch of rows along its tokens: token by token, or chunk by chunk.

A batch is `rows x width` tokens of which row r uses the first `lens[r]`; what lies beyond (padding)
is never read: not its values, not its NaNs. Both walks give zeros at padding and leave the state of
a row without tokens as it is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CHUNK = 64
"""Tokens per chunk of the chunked forms, counted from the first token of the step's row."""

Walk = tuple[jax.Array, jax.Array]
"""(out [R, W, ...], state [R, ...])."""


def walk_tokens(
    step: Callable[[Any, jax.Array], Walk], tokens: Any, state: jax.Array, lens: jax.Array
) -> Walk:
    """`step(token, state) -> (out, state)` for each token in turn; the readable form.

    tokens: pytree of [R, W, ...], which `step` sees without the axis W. state: [R, ...].
    lens: int32[R].
    """
    width = jax.tree.leaves(tokens)[0].shape[1]

    def body(state: jax.Array, at: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        position, token = at
        used = position < lens
        out, new = step(jax.tree.map(lambda x: _keep(used, x), token), state)
        return jnp.where(_lift(used, state), new, state), _keep(used, out)

    by_position = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    state, out = jax.lax.scan(body, state, (jnp.arange(width), by_position))
    return jnp.moveaxis(out, 0, 1), state


def walk_chunks(
    chunk: Callable[[Any, jax.Array, jax.Array], Walk],
    tokens: Any,
    state: jax.Array,
    lens: jax.Array,
) -> Walk:
    """`chunk(piece, used, state) -> (out, state)` for each CHUNK tokens in turn.

    The chunks are a loop of as many turns as the longest row needs, and every turn has the same
    shapes whatever the width: a chunk's bits depend on its own tokens and the state before it, not
    on the number of chunks in the step. So a prefill cut at multiples of CHUNK equals the uncut.

    tokens: pytree of [R, W, H, ...], W any number. `chunk` gets pieces [R, H, CHUNK, ...] in
    float32 with zeros at padding, and used: int32[R], how many of the CHUNK tokens are real; it
    answers out float32[R, H, CHUNK, V] and the new state float32[R, H, K, V].
    """
    width = jax.tree.leaves(tokens)[0].shape[1]
    padding = -width % CHUNK
    tokens = jax.tree.map(lambda x: _pad_tokens(x, padding), tokens)

    def piece_of(x: jax.Array, start: jax.Array, used: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_slice_in_dim(x, start, CHUNK, axis=1)
        piece = _keep(jnp.arange(CHUNK) < used[:, None], piece)
        return jnp.swapaxes(piece, 1, 2).astype(jnp.float32)

    def body(turn: jax.Array, carry: Walk) -> Walk:
        out, state = carry
        start = turn * CHUNK
        used = jnp.clip(lens - start, 0, CHUNK)
        new_out, new_state = chunk(
            jax.tree.map(lambda x: piece_of(x, start, used), tokens), used, state
        )
        new_out = _keep(jnp.arange(CHUNK) < used[:, None], jnp.swapaxes(new_out, 1, 2))
        out = jax.lax.dynamic_update_slice_in_dim(out, new_out, start, axis=1)
        return out, jnp.where(_lift(used > 0, state), new_state, state)

    # The turns are counted at run time also when the width allows one only: XLA would inline a loop
    # of one turn and fuse it with its surroundings, and the bits could differ from the loop's.
    turns = jnp.max(-(-lens // CHUNK))
    rows, heads, value_dim = state.shape[0], state.shape[1], state.shape[-1]
    out = jnp.zeros((rows, width + padding, heads, value_dim), jnp.float32)
    out, state = jax.lax.fori_loop(0, turns, body, (out, state))
    return out[:, :width], state


def _lift(flags: jax.Array, like: jax.Array) -> jax.Array:
    """Flags of the leading axes, with axes of length 1 for the rest of `like`."""
    return flags.reshape(flags.shape + (1,) * (like.ndim - flags.ndim))


def _keep(flags: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(_lift(flags, x), x, 0)


def _pad_tokens(x: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) if padding else x
