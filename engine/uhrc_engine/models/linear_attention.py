"""What every recurrent layer does with its state: fetch it, advance it, store it, track it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from uhrc_engine.models.contract import PADDING_INDEX, StepInputs
from uhrc_recurrent.kernels.conv1d import conv1d_prefill, conv1d_step
from uhrc_recurrent.kernels.gla import GLATokens, gla_prefill, gla_step
from uhrc_recurrent.kernels.walk import Walk
from uhrc_recurrent.pool import LayerState, RecurrentLayer


def advance(
    cache: RecurrentLayer,
    inputs: StepInputs,
    mix: Callable[[LayerState], tuple[jax.Array, LayerState]],
) -> tuple[jax.Array, RecurrentLayer]:
    """`mix(states of the rows) -> (out, final states)`, and the layer with the final states in the
    rows' running slots and in their track slots.

    A row that has computed nothing yet reads beyond the pool, which gives zeros: whatever its slot
    held before does not matter. Padding rows write nothing.
    """
    is_fresh = inputs.kv_lens == inputs.q_lens
    out, state = mix(cache.gather(jnp.where(is_fresh, PADDING_INDEX, inputs.state_slots)))
    is_used = inputs.q_lens > 0
    cache = cache.scatter(state, jnp.where(is_used, inputs.state_slots, PADDING_INDEX))
    return out, cache.track(state, inputs.track_slots, is_used)


def run_tokens(
    step: Callable[[Any, jax.Array], Walk],
    prefill: Callable[[Any, jax.Array, jax.Array], Walk],
    tokens: Any,
    temporal: jax.Array,
    inputs: StepInputs,
) -> Walk:
    """A kernel's decode form in a step of width 1, else its prefill form.

    tokens: pytree of [R, W, ...]; temporal: float32[R, heads, key_dim, value_dim]. Returns out
    [R, W, ...] and the final states.
    """
    if inputs.width > 1:
        return prefill(tokens, temporal, inputs.q_lens)
    out, temporal = step(jax.tree.map(lambda x: x[:, 0], tokens), temporal)
    return out[:, None], temporal


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    states: tuple[jax.Array, ...],
    inputs: StepInputs,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The causal convolution and SiLU over x [R, W, C]; weight [C, kernel], bias [C] if any.

    states: [R, kernel - 1, c] of consecutive runs of the C channels, which are convolved together.
    Returns [R, W, C] and the final states.
    """
    state = jnp.concatenate(states, axis=-1)
    y, state = run_tokens(
        lambda token, state: conv1d_step(token, weight, state, bias),
        lambda tokens, state, lens: conv1d_prefill(tokens, weight, state, lens, bias),
        x,
        state,
        inputs,
    )
    return y, split(state, tuple(part.shape[-1] for part in states))


def split(x: jax.Array, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Consecutive parts of the last axis, of these sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(x[..., end - size : end] for size, end in zip(sizes, ends, strict=True))


def lightning(
    tokens: GLATokens, log_decay: jax.Array, cache: RecurrentLayer, inputs: StepInputs
) -> tuple[jax.Array, RecurrentLayer]:
    """A Lightning layer's recurrence: tokens [R, W, heads, dim], log_decay float32[heads].

    Returns float32[R, W, heads, dim] and the layer's cache written.
    """

    def mix(state: LayerState) -> tuple[jax.Array, LayerState]:
        out, temporal = run_tokens(
            lambda token, state: gla_step(token, log_decay, state),
            lambda tokens, state, lens: gla_prefill(tokens, log_decay, state, lens),
            tokens,
            state.temporal,
            inputs,
        )
        return out, LayerState(temporal, ())

    return advance(cache, inputs, mix)
