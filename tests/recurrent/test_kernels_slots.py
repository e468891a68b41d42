"""The short convolution, and the kernels that move states between rows and slots."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_recurrent.kernels.conv1d import CONV1D_PREFILL, conv1d_prefill, conv1d_step
from uhrc_recurrent.kernels.slot_copy import COPY_SLOTS, copy_slots
from uhrc_recurrent.kernels.track_scatter import (
    SCATTER_SLOTS,
    gather_slots,
    scatter_slots,
    track_scatter,
)

SLOTS = 6
conv_forms = pytest.mark.parametrize("implementation", CONV1D_PREFILL.implementations)
kernels = pytest.mark.parametrize("kernel", (2, 3, 4, 5))


def conv_inputs(kernel, rows=3, width=12, channels=5):
    normal = partial(np.random.default_rng(kernel).standard_normal, dtype=np.float32)
    return (
        normal((rows, width, channels)),
        normal((channels, kernel)),
        normal((rows, kernel - 1, channels)),
    )


def conv_expected(x, weight, state, bias=0.0):
    """float64, one row: y [n, C] and the last kernel - 1 inputs."""
    inputs = np.concatenate([state, x]).astype(np.float64)
    kernel = weight.shape[1]
    y = np.stack([(inputs[t : t + kernel] * weight.T).sum(0) for t in range(len(x))]) + bias
    return y / (1 + np.exp(-y)), inputs[len(x) :]


@conv_forms
@kernels
def test_conv_of_rows_of_different_lengths(kernel, implementation):
    x, weight, state = conv_inputs(kernel)
    lens = np.array([12, 1, 0], np.int32)
    padded = np.where((np.arange(12) < lens[:, None])[..., None], x, np.nan)
    y, final = conv1d_prefill(padded, weight, state, lens, implementation=implementation)
    for row, n in enumerate(lens[:2]):
        expected, last = conv_expected(x[row, :n], weight, state[row])
        np.testing.assert_allclose(y[row, :n], expected, atol=1e-6)
        assert np.array_equal(final[row], last.astype(np.float32))
        assert not np.asarray(y)[row, n:].any()
    assert np.array_equal(final[2], state[2])


@kernels
def test_conv_cut_anywhere_gives_the_same_bits_as_uncut_and_as_steps(kernel):
    x, weight, state = conv_inputs(kernel)
    run = jax.jit(conv1d_prefill)
    whole, final = run(x, weight, state, np.full(3, 12, np.int32))
    for cut in range(1, 12):
        padding = [(0, 0), (0, cut), (0, 0)]
        first, middle = run(x, weight, state, np.full(3, cut, np.int32))
        rest = np.pad(x[:, cut:], padding)
        second, last = run(rest, weight, middle, np.full(3, 12 - cut, np.int32))
        y = np.concatenate([first[:, :cut], second[:, : 12 - cut]], axis=1)
        assert np.array_equal(y, whole)
        assert np.array_equal(last, final)
    step, now = jax.jit(conv1d_step), state
    for t in range(12):
        y, now = step(x[:, t], weight, now)
        assert np.array_equal(y, whole[:, t])
    assert np.array_equal(now, final)


@conv_forms
def test_conv_adds_a_bias_per_channel_before_the_activation(implementation):
    x, weight, state = conv_inputs(4)
    bias, lens = np.float32([0.5, -1, 0, 2, -3]), np.full(3, 12, np.int32)
    y, _ = conv1d_prefill(x, weight, state, lens, bias, implementation=implementation)
    stepped, _ = conv1d_step(x[:, 0], weight, state, bias, implementation=implementation)
    for row in range(3):
        expected, _ = conv_expected(x[row], weight, state[row], bias)
        np.testing.assert_allclose(y[row], expected, atol=1e-6)
        np.testing.assert_allclose(stepped[row], expected[0], atol=1e-6)


def test_conv_state_keeps_the_dtype_of_the_model():
    x, weight, state = (jnp.asarray(a, jnp.bfloat16) for a in conv_inputs(4))
    y, final = conv1d_prefill(x, weight, state, np.full(3, 12, np.int32))
    assert y.dtype == final.dtype == jnp.bfloat16


def pools():
    """Two arrays of different kinds, each slot filled with a number of its own."""
    slots = np.arange(SLOTS, dtype=np.float32)
    return {
        "temporal": np.broadcast_to(slots[:, None, None, None], (SLOTS, 2, 3, 4)).copy(),
        "conv": np.broadcast_to(10 + slots[:, None, None], (SLOTS, 3, 5)).copy(),
    }


@pytest.mark.parametrize("implementation", COPY_SLOTS.implementations)
@pytest.mark.parametrize(
    ("src", "dst", "moved"),
    [
        ([0, 1], [4, 5], {4: 0, 5: 1}),
        ([2, 2, 2], [3, 4, 5], {3: 2, 4: 2, 5: 2}),
        ([-1, 3, SLOTS, -7], [0, 1, 2, 3], {1: 3}),
        ([0, 1, 2], [-1, SLOTS, 2**30], {}),
        ([-1, -1], [SLOTS, SLOTS], {}),
    ],
    ids=["distinct", "one source", "no source", "no target", "nothing"],
)
def test_copy_slots_moves_whole_slots_and_nothing_else(src, dst, moved, implementation):
    before = pools()
    copy = jax.jit(partial(copy_slots, implementation=implementation))
    after = copy(before, np.int32(src), np.int32(dst))
    for name, pool in before.items():
        expected = pool.copy()
        for to, source in moved.items():
            expected[to] = pool[source]
        assert np.array_equal(after[name], expected)


@pytest.mark.parametrize("implementation", SCATTER_SLOTS.implementations)
def test_scatter_and_track_drop_rows_out_of_range_and_unmasked(implementation):
    pool = jnp.full((SLOTS, 3), jnp.nan)
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    scattered = scatter_slots(
        pool, rows, np.int32([5, -1, SLOTS, 0]), implementation=implementation
    )
    tracked = track_scatter(
        pool,
        rows,
        np.int32([1, 2, 3, -1]),
        np.array([True, False, True, True]),
        implementation=implementation,
    )
    expected = np.array(pool)
    expected[5], expected[0] = rows[0], rows[3]
    np.testing.assert_array_equal(scattered, expected)
    expected = np.array(pool)
    expected[1], expected[3] = rows[0], rows[2]
    np.testing.assert_array_equal(tracked, expected)


def test_gather_gives_fresh_states_out_of_range():
    pool = 1 + jnp.arange(SLOTS)[:, None] * jnp.ones(3)
    rows = gather_slots(pool, np.int32([2, -1, SLOTS, 0]))
    np.testing.assert_array_equal(rows[:, 0], [3, 0, 0, 1])
