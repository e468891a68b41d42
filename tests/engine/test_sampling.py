"""Sampling: greedy, truncation, and draws that depend on seed and position alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_engine.sampling import SamplingParams, sample

VOCAB = 50
LOGITS = jnp.asarray(np.random.default_rng(0).standard_normal((4, VOCAB)), jnp.float32)


def draws(params: SamplingParams, logits=LOGITS[:1], count: int = 300) -> list[int]:
    """What one request draws at `count` positions."""
    return [int(sample(logits, [params], [position])[0]) for position in range(count)]


def test_the_default_is_greedy_and_ties_go_to_the_lowest_id():
    tied = jnp.zeros((2, VOCAB)).at[0, jnp.array([7, 9])].set(1.0)
    np.testing.assert_array_equal(sample(tied, [SamplingParams()] * 2, [0, 0]), [7, 0])


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    params = [SamplingParams(temperature=2.0, seed=3), SamplingParams()]
    assert sample(LOGITS, params, [5, 5])[1] == int(LOGITS[1].argmax())


def test_a_draw_does_not_depend_on_the_batch():
    params = [SamplingParams(temperature=1.3, top_p=0.9, seed=seed) for seed in (1, 2, 3, 4)]
    together = sample(LOGITS, params, [10, 20, 30, 40])
    alone = [sample(LOGITS[i : i + 1], [params[i]], [10 * i + 10])[0] for i in range(4)]
    padded = sample(LOGITS, params[:1], [10])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(padded, together[:1])


def test_seed_and_position_change_the_draw():
    hot = {"temperature": 5.0}
    assert draws(SamplingParams(**hot, seed=1)) == draws(SamplingParams(**hot, seed=1))
    assert draws(SamplingParams(**hot, seed=1)) != draws(SamplingParams(**hot, seed=2))
    assert len(set(draws(SamplingParams(**hot, seed=1)))) > 30


def test_frequencies_follow_the_softmax_at_the_temperature():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    counts = np.bincount(draws(SamplingParams(temperature=0.5), logits, 1000), minlength=3)
    expected = np.array([0.25, 0.09, 0.04]) / 0.38
    np.testing.assert_allclose(counts / 1000, expected, atol=0.05)  # > 3 standard deviations


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.99}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # 0.5 of the 0.8 that top_k left
        ({}, {0, 1, 2, 3, 4}),
    ],
)
def test_only_kept_tokens_are_drawn(params, kept):
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.125, 0.07, 0.005]]))
    assert set(draws(SamplingParams(temperature=1.0, **params), logits, 1500)) == kept


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0: must be a number >= 0"),
        ({"temperature": float("nan")}, "temperature = nan: must be a number >= 0"),
        ({"top_p": 0.0}, r"top_p = 0.0: must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k = -1: must be an integer >= 0"),
        ({"seed": 2**32}, r"seed = 4294967296: must be an integer in \[0, 2\*\*32\)"),
    ],
)
def test_parameters_out_of_range_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**bad)
