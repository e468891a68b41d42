"""Both forms of the Mamba-2 kernels against the formula; the kit checks cuts, rows and dtypes."""

from __future__ import annotations

from functools import cache, partial

import jax
import numpy as np
import pytest

from uhrc_mamba2.ssd import SSDTokens, mamba2_prefill, mamba2_step

ROWS, WIDTH, HEADS, GROUPS, HEAD_DIM, STATE = 3, 192, 4, 2, 8, 12
A = -np.array([0.01, 0.5, 2.0, 16.0], np.float32)
LENS = np.array([WIDTH, 0, 150], np.int32)


def random_tokens(seed: int = 0) -> SSDTokens:
    normal = partial(np.random.default_rng(seed).standard_normal, dtype=np.float32)
    dt = np.logaddexp(0, normal((ROWS, WIDTH, HEADS, 1)) - 1)
    b, c = (normal((ROWS, WIDTH, GROUPS, STATE)) for _ in range(2))
    return SSDTokens(normal((ROWS, WIDTH, HEADS, HEAD_DIM)), dt, b, c)


def random_state() -> np.ndarray:
    shape = (ROWS, HEADS, HEAD_DIM, STATE)
    return np.random.default_rng(9).standard_normal(shape, dtype=np.float32)


@cache
def jitted(implementation: str):
    return jax.jit(partial(mamba2_prefill, implementation=implementation))


def run(tokens: SSDTokens, state, lens=LENS, implementation: str = "xla"):
    out, state = jitted(implementation)(tokens, A, state, np.asarray(lens, np.int32))
    return np.asarray(out), np.asarray(state)


def by_the_formula(tokens: SSDTokens, state: np.ndarray, row: int, count: int):
    """float64, head by head: out [count, H, P] and the final state [H, P, N]."""
    x, dt, b, c = (part[row, :count].astype(np.float64) for part in tokens)
    state, out = state[row].astype(np.float64), np.zeros((count, HEADS, HEAD_DIM))
    for t in range(count):
        for h in range(HEADS):
            group = h // (HEADS // GROUPS)
            state[h] *= np.exp(dt[t, h, 0] * A[h])
            state[h] += dt[t, h, 0] * np.outer(x[t, h], b[t, group])
            out[t, h] = state[h] @ c[t, group]
    return out, state


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_prefill_is_the_formula(implementation: str) -> None:
    """Of rows of different lengths; what stands beyond them is not read."""
    tokens, state = random_tokens(), random_state()
    is_padding = (np.arange(WIDTH) >= LENS[:, None])[..., None, None]
    spoiled = jax.tree.map(lambda part: np.where(is_padding, np.nan, part), tokens)
    out, final = run(spoiled, state, implementation=implementation)
    for row in (0, 2):
        count = int(LENS[row])
        expected_out, expected_state = by_the_formula(tokens, state, row, count)
        np.testing.assert_allclose(out[row, :count], expected_out, atol=5e-5)
        np.testing.assert_allclose(final[row], expected_state, atol=5e-5)
        assert not out[row, count:].any()
    assert np.array_equal(final[1], state[1])
    assert not out[1].any()


def test_steps_are_the_formula() -> None:
    tokens, state = random_tokens(), random_state()
    step, now, outs = jax.jit(mamba2_step), state, []
    for t in range(10):
        out, now = step(jax.tree.map(lambda part, t=t: part[:, t], tokens), A, now)
        outs.append(out)
    for row in range(ROWS):
        expected_out, expected_state = by_the_formula(tokens, state, row, 10)
        np.testing.assert_allclose(np.stack(outs)[:, row], expected_out, atol=1e-5)
        np.testing.assert_allclose(now[row], expected_state, atol=1e-5)


def test_a_token_that_forgets_all_costs_the_others_no_accuracy() -> None:
    """Sums of log decay then are large and their differences small."""
    tokens, state = random_tokens(), random_state()
    position = np.arange(WIDTH)[None, :, None, None]
    dt = np.where(position % 5 == 0, 30.0, np.where(position % 7 == 0, 2.0, 1e-3))
    tokens = tokens._replace(dt=np.broadcast_to(dt, tokens.dt.shape).astype(np.float32))
    out, final = run(tokens, state, [WIDTH] * ROWS)
    expected_out, expected_state = by_the_formula(tokens, state, 0, WIDTH)
    scale = np.abs(expected_out).max()
    np.testing.assert_allclose(out[0], expected_out, atol=1e-6 * scale)
    np.testing.assert_allclose(final[0], expected_state, atol=1e-6 * scale)
