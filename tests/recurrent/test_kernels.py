"""The recurrent kernels: forms against each other, cuts, padding, and the cases that break them."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_recurrent.kernels.delta import DeltaTokens
from uhrc_recurrent.kernels.gdn import gdn_log_decay, gdn_prefill, gdn_step
from uhrc_recurrent.kernels.gla import (
    GLATokens,
    bailing_log_decay,
    gla_prefill,
    gla_step,
    minimax_log_decay,
)
from uhrc_recurrent.kernels.kda import kda_log_decay, kda_prefill, kda_step
from uhrc_recurrent.kernels.walk import CHUNK

# One shape of batch for all tests of a kernel, so that each is compiled once.
ROWS, WIDTH, HEADS, KEY_DIM, VALUE_DIM = 4, 256, 2, 8, 16
GLA_DECAY = np.array([-0.7, -0.002], np.float32)


@cache
def jitted(prefill, implementation):
    return jax.jit(partial(prefill, implementation=implementation))


class Mixer(NamedTuple):
    """A backend's kernels as prefill(tokens, state, lens) and step(tokens, state)."""

    name: str
    prefill: object
    step: object

    def run(self, tokens, state, lens, implementation="xla"):
        out, state = jitted(self.prefill, implementation)(tokens, state, np.asarray(lens, np.int32))
        return np.asarray(out), np.asarray(state)

    def tokens(self, seed=0, rows=ROWS, width=WIDTH):
        """Random tokens with decays from hardly any to nearly all."""
        normal = partial(np.random.default_rng(seed).standard_normal, dtype=np.float32)
        heads = 1 if self.name == "gdn" else HEADS
        q, k = (normal((rows, width, heads, KEY_DIM)) for _ in range(2))
        v = normal((rows, width, HEADS, VALUE_DIM))
        if self.name == "gla":
            return GLATokens(q * 0.2, k, v)
        channels = KEY_DIM if self.name == "kda" else 1
        log_decay = -np.exp(2 * normal((rows, width, HEADS, channels)) - 1)
        beta = 1 / (1 + np.exp(-normal((rows, width, HEADS, 1))))
        return DeltaTokens(q, k, v, log_decay, beta)


def with_decay(kernel):
    def call(tokens, state, *rest, **kwargs):
        return kernel(tokens, jnp.asarray(GLA_DECAY), state, *rest, **kwargs)

    return call


KDA = Mixer("kda", kda_prefill, kda_step)
GDN = Mixer("gdn", gdn_prefill, gdn_step)
GLA = Mixer("gla", with_decay(gla_prefill), with_decay(gla_step))
every_mixer = pytest.mark.parametrize("mixer", [KDA, GDN, GLA], ids=lambda m: m.name)
delta_mixers = pytest.mark.parametrize("mixer", [KDA, GDN], ids=lambda m: m.name)


def random_state(seed=9):
    return np.random.default_rng(seed).standard_normal(
        (ROWS, HEADS, KEY_DIM, VALUE_DIM), dtype=np.float32
    )


def assert_close(actual, expected, tolerance=1e-5):
    """Relative to the largest value: GLA adds up hundreds of products."""
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)


def window(tokens, starts, width):
    """Tokens [starts[r], starts[r] + width) of each row; past the end, the end again."""
    at = np.minimum(np.asarray(starts)[:, None] + np.arange(width), WIDTH - 1)
    return jax.tree.map(lambda x: x[np.arange(len(x))[:, None], at], tokens)


@every_mixer
def test_chunked_form_equals_token_by_token(mixer):
    tokens, state, lens = mixer.tokens(), random_state(), [WIDTH, 0, 193, 64]
    out, final = mixer.run(tokens, state, lens)
    expected_out, expected_final = mixer.run(tokens, state, lens, "reference")
    assert_close(out, expected_out)
    assert_close(final, expected_final)
    assert np.array_equal(final[1], state[1])


@delta_mixers
def test_equal_keys_full_beta_and_no_decay(mixer):
    """The case in which powers of the chunk's matrix grow to 1e20."""
    tokens = mixer.tokens()
    tokens = tokens._replace(
        k=np.ones_like(tokens.k),
        beta=np.ones_like(tokens.beta),
        log_decay=np.zeros_like(tokens.log_decay),
    )
    out, final = mixer.run(tokens, random_state(), [WIDTH] * ROWS)
    expected_out, expected_final = mixer.run(tokens, random_state(), [WIDTH] * ROWS, "reference")
    assert_close(out, expected_out)
    assert_close(final, expected_final)


@delta_mixers
def test_decays_from_none_to_total_keep_their_accuracy(mixer):
    """After a token that forgets everything, sums of log decay are large and differences small."""
    tokens = mixer.tokens()
    position = np.arange(WIDTH)[None, :, None, None]
    strong = np.where(position % 5 == 0, -300.0, np.where(position % 7 == 0, -15.0, -1e-3))
    tokens = tokens._replace(log_decay=np.broadcast_to(strong, tokens.log_decay.shape) * 1.0)
    tokens = jax.tree.map(lambda x: x.astype(np.float32), tokens)
    out, final = mixer.run(tokens, random_state(), [WIDTH] * ROWS)
    expected_out, expected_final = mixer.run(tokens, random_state(), [WIDTH] * ROWS, "reference")
    assert_close(out, expected_out)
    assert_close(final, expected_final)


@every_mixer
def test_cuts_on_the_chunk_grid_give_the_same_bits(mixer):
    """Whether a piece has the width of the whole step or its own."""
    tokens, state, lens = mixer.tokens(), random_state(), np.array([256, 65, 191, 127])
    out, final = mixer.run(tokens, state, lens)
    for cuts, width in (((0, 64, 128, 192), 64), ((0, 128), WIDTH), ((0, 64), WIDTH)):
        piece_state, outs = state, np.zeros_like(out)
        for start, end in zip(cuts, (*cuts[1:], WIDTH), strict=True):
            piece = window(tokens, [start] * ROWS, width)
            piece_lens = np.clip(lens - start, 0, end - start)
            piece_out, piece_state = mixer.run(piece, piece_state, piece_lens)
            outs[:, start:end] = piece_out[:, : end - start]
        assert np.array_equal(outs, out)
        assert np.array_equal(piece_state, final)


@every_mixer
def test_every_residue_of_the_chunk_as_length_and_as_cut(mixer):
    tokens, state, total = mixer.tokens(), random_state(), 200
    expected_out, expected_final = mixer.run(tokens, state, [total] * ROWS, "reference")
    for first in range(CHUNK, 2 * CHUNK + 1, ROWS):
        lens = np.arange(first, first + ROWS)
        out, middle = mixer.run(tokens, state, lens)
        rest = window(tokens, lens, WIDTH)
        rest_out, final = mixer.run(rest, middle, total - lens)
        for row, n in enumerate(lens):
            assert_close(out[row, :n], expected_out[row, :n])
            assert not out[row, n:].any()
            assert_close(rest_out[row, : total - n], expected_out[row, n:total])
        assert_close(final, expected_final)


@every_mixer
def test_padding_is_not_read(mixer):
    lens = np.array([130, 0, 1, 64])
    tokens, state = mixer.tokens(), random_state()
    used = np.arange(WIDTH) < lens[:, None]
    poisoned = jax.tree.map(
        lambda x: np.where(used.reshape(*used.shape, *(1,) * (x.ndim - 2)), x, np.nan), tokens
    )
    for implementation in ("xla", "reference"):
        out, final = mixer.run(poisoned, state, lens, implementation)
        clean_out, clean_final = mixer.run(tokens, state, lens, implementation)
        assert np.array_equal(out, clean_out)
        assert np.array_equal(final, clean_final)
        assert not out[~used].any()


@every_mixer
def test_a_row_without_tokens_keeps_its_state_bit_for_bit(mixer):
    state = random_state()
    state[1] = np.resize(np.float32([-0.0, np.inf, np.nan, 1e-40]), state[1].shape)
    for implementation in ("xla", "reference"):
        _, final = mixer.run(mixer.tokens(), state, [130, 0, 1, 64], implementation)
        assert final[1].tobytes() == state[1].tobytes()


@every_mixer
def test_a_row_does_not_depend_on_the_others(mixer):
    tokens, state, lens = mixer.tokens(), random_state(), np.array([130, 256, 70, 64])
    out, final = mixer.run(tokens, state, lens)
    others = mixer.tokens(seed=5)
    mixed = jax.tree.map(lambda x, y: np.concatenate([x[:1], y[1:]]), tokens, others)
    dirty = np.concatenate([state[:1], np.full_like(state[1:], np.nan)])
    alone, alone_final = mixer.run(mixed, dirty, [130, 0, 7, 200])
    assert np.array_equal(alone[0], out[0])
    assert np.array_equal(alone_final[0], final[0])


@every_mixer
def test_decode_steps_continue_a_prefill(mixer):
    tokens, state = mixer.tokens(), random_state()
    expected_out, expected_final = mixer.run(tokens, state, [70] * ROWS, "reference")
    _, now = mixer.run(tokens, state, [67] * ROWS)
    step = jax.jit(mixer.step)
    for i in range(67, 70):
        out, now = step(jax.tree.map(lambda x, i=i: x[:, i], tokens), now)
        assert_close(out, expected_out[:, i])
    assert_close(now, expected_final)


@every_mixer
def test_bfloat16_tokens_are_computed_in_float32(mixer):
    tokens = jax.tree.map(lambda x: jnp.asarray(x[:, 0], jnp.bfloat16), mixer.tokens())
    out, state = mixer.step(tokens, random_state())
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), tokens)
    expected_out, expected_state = mixer.step(widened, random_state())
    assert out.dtype == state.dtype == jnp.float32
    assert_close(out, expected_out, 1e-6)
    assert_close(state, expected_state, 1e-6)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"no implementation 'cuda'; registered: reference, xla"):
        kda_prefill(KDA.tokens(), random_state(), np.zeros(ROWS, np.int32), implementation="cuda")


def test_kda_gate_with_and_without_a_bound():
    x, a_log = np.array([[-3.0, 0.5, 30.0, 2.0]]), np.log([2.0, 5.0])
    dt_bias = np.array([0.1, 0.2, 0.3, 0.4])
    biased, rate = x + dt_bias, np.array([2.0, 2.0, 5.0, 5.0])
    free = kda_log_decay(*(np.float32(y) for y in (x, a_log, dt_bias)))
    bounded = kda_log_decay(*(np.float32(y) for y in (x, a_log, dt_bias)), lower_bound=-5.0)
    assert free.shape == (1, 2, 2)
    np.testing.assert_allclose(free.ravel(), (-rate * np.logaddexp(0, biased))[0], rtol=1e-6)
    expected = -5 / (1 + np.exp(-rate * biased))
    np.testing.assert_allclose(bounded.ravel(), expected[0], rtol=1e-6)


def test_gdn_gate():
    x, a_log, dt_bias = (np.float32(y) for y in ([[-1.0, 2.0]], [0.0, 1.0], [0.5, -0.5]))
    expected = -np.exp([0.0, 1.0]) * np.logaddexp(0, [-0.5, 1.5])
    gate = gdn_log_decay(x, a_log, dt_bias)
    assert gate.shape == (1, 2, 1)
    np.testing.assert_allclose(gate[0, :, 0], expected, rtol=1e-6)


def test_lightning_decays_of_both_families():
    """Slopes 1/4, 1/16, 1/64, 1/256 for 4 heads; 6 heads borrow from 8; layers fade."""
    np.testing.assert_allclose(
        minimax_log_decay(4, 1, 4), [-x * (2 / 3 + 1e-5) for x in (0.25, 1 / 16, 1 / 64, 1 / 256)],
        rtol=1e-5,
    )  # fmt: skip
    np.testing.assert_allclose(minimax_log_decay(3, 0, 4)[0], -(2 ** (-8 / 3)) * 1.00001, rtol=1e-6)
    np.testing.assert_allclose(
        bailing_log_decay(6, 1, 4),
        [-x * 1.00001 for x in (0.25, 1 / 16, 1 / 64, 1 / 256, 0.5, 0.125)],
        rtol=1e-6,
    )
    np.testing.assert_allclose(bailing_log_decay(4, 0, 4)[0], -0.25 * (4 / 3 + 1e-5), rtol=1e-6)
