"""The recurrent kernels inside the layers that use them, against transformers' own torch modules.

The goldens come from tests/oracle/make_recurrent.py; weights and inputs are recreated from names.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import recurrent_cases as oracle
from uhrc_recurrent.kernels.conv1d import conv1d_prefill, conv1d_step
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

GOLDENS = np.load(Path(__file__).parents[1] / "oracle" / "goldens" / "recurrent.npz")
CASES = {case.name: case for case in oracle.CASES}
WIDTH = 192


class Layer:
    """One layer as a model runs it: `lens` None is a decode step of x [R, 1, hidden]."""

    def __init__(self, case):
        self.case = case
        self.w = {name: jnp.asarray(value) for name, value in oracle.weights(case).items()}
        self.prefill = jax.jit(lambda x, state, lens: self(x, state, lens))
        self.step = jax.jit(lambda x, state: self(x, state, None))

    def fresh(self):
        c = self.case
        temporal = jnp.zeros((oracle.ROWS, c.heads, c.key_dim, c.value_dim))
        channels = (c.key_width, c.key_width, c.value_width) if c.conv_kernel > 1 else ()
        return temporal, tuple(jnp.zeros((oracle.ROWS, c.conv_kernel - 1, n)) for n in channels)

    def project(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def convolve(self, qkv, convs, lens):
        """Three convolutions with the three parts of the module's one weight."""
        c, outs, states = self.case, [], []
        edges = np.cumsum([c.key_width, c.key_width])
        for x, kernel, state in zip(
            qkv, jnp.split(self.w["conv1d.weight"][:, 0], edges), convs, strict=True
        ):
            if lens is None:
                y, state = conv1d_step(x[:, 0], kernel, state)
                y = y[:, None]
            else:
                y, state = conv1d_prefill(x, kernel, state, lens)
            outs.append(y)
            states.append(state)
        return outs, tuple(states)

    def mix(self, prefill, step, tokens, state, lens):
        if lens is not None:
            return prefill(tokens, state, lens)
        out, state = step(jax.tree.map(lambda x: x[:, 0], tokens), state)
        return out[:, None], state

    def heads(self, x, heads):
        return x.reshape(*x.shape[:2], heads, -1)

    def __call__(self, x, state, lens):
        layer = {
            "kimi_linear": self.kda,
            "bailing_hybrid": self.kda,
            "qwen3_next": self.gdn,
            "qwen3_5": self.gdn,
            "minimax": self.minimax,
        }[self.case.family]
        return layer(x, *state, lens)

    def kda(self, x, temporal, convs, lens):
        c, p = self.case, self.project
        qkv = [p(x, f"{name}_proj") for name in "qkv"]
        qkv, convs = self.convolve(qkv, convs, lens)
        if c.family == "bailing_hybrid":
            forget, gate = p(x, "forget_gate.f_proj"), p(x, "g_proj")
        else:
            forget = p(p(x, "forget_gate.f_a_proj"), "forget_gate.f_b_proj")
            gate = p(p(x, "g_a_proj"), "g_b_proj")
        tokens = DeltaTokens(
            *(self.heads(y, c.heads) for y in qkv),
            kda_log_decay(
                forget,
                self.w["forget_gate.A_log"],
                self.w["forget_gate.dt_bias"],
                -5.0 if c.safe_gate else None,
            ),
            jax.nn.sigmoid(p(x, "b_proj"))[..., None],
        )
        out, temporal = self.mix(kda_prefill, kda_step, tokens, temporal, lens)
        out = self.rms_norm(out, "o_norm", 1e-6 if c.family == "bailing_hybrid" else 1e-5)
        out = out * jax.nn.sigmoid(self.heads(gate, c.heads))
        return p(out.reshape(*x.shape[:2], -1), "o_proj"), (temporal, convs)

    def gdn(self, x, temporal, convs, lens):
        c, p = self.case, self.project
        *qkv, z, b, a = self.gdn_qwen3_next(x) if c.family == "qwen3_next" else self.gdn_qwen3_5(x)
        (q, k, v), convs = self.convolve(qkv, convs, lens)
        tokens = DeltaTokens(
            self.heads(q, c.key_heads),
            self.heads(k, c.key_heads),
            self.heads(v, c.heads),
            gdn_log_decay(a, self.w["A_log"], self.w["dt_bias"]),
            jax.nn.sigmoid(b)[..., None],
        )
        out, temporal = self.mix(gdn_prefill, gdn_step, tokens, temporal, lens)
        out = self.rms_norm(out, "norm", 1e-6) * jax.nn.silu(self.heads(z, c.heads))
        return p(out.reshape(*x.shape[:2], -1), "out_proj"), (temporal, convs)

    def gdn_qwen3_5(self, x):
        c, p = self.case, self.project
        qkv = jnp.split(p(x, "in_proj_qkv"), np.cumsum([c.key_width, c.key_width]), axis=-1)
        return *qkv, p(x, "in_proj_z"), p(x, "in_proj_b"), p(x, "in_proj_a")

    def gdn_qwen3_next(self, x):
        """Its projections are ordered by key head: q, k, v, z of the first head, then the next."""
        c, ratio = self.case, self.case.heads // self.case.key_heads
        sizes = np.cumsum([c.key_dim, c.key_dim, ratio * c.value_dim])
        qkvz = self.heads(self.project(x, "in_proj_qkvz"), c.key_heads)
        ba = self.heads(self.project(x, "in_proj_ba"), c.key_heads)
        parts = [*jnp.split(qkvz, sizes, axis=-1), *jnp.split(ba, 2, axis=-1)]
        return [part.reshape(*x.shape[:2], -1) for part in parts]

    def minimax(self, x, temporal, convs, lens):
        c, p = self.case, self.project
        qkv = self.heads(jax.nn.silu(p(x, "qkv_proj")), c.heads)
        log_decay = minimax_log_decay(c.heads, c.layer_idx, c.num_layers)
        out, temporal = self.mix(
            lambda tokens, *rest: gla_prefill(tokens, log_decay, *rest),
            lambda tokens, state: gla_step(tokens, log_decay, state),
            GLATokens(*jnp.split(qkv, 3, axis=-1)),
            temporal,
            lens,
        )
        out = self.rms_norm(out.reshape(*x.shape[:2], -1), "norm", 1e-5)
        return p(out * jax.nn.sigmoid(p(x, "output_gate")), "out_proj"), (temporal, convs)

    def rms_norm(self, x, name, eps):
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
        return x * scale * self.w[f"{name}.weight"]


def padded(x):
    """[R, n, ...] -> [R, WIDTH, ...], NaN beyond n."""
    spare = [(0, 0)] * (x.ndim - 2)
    return np.pad(x, [(0, 0), (0, WIDTH - x.shape[1]), *spare], constant_values=np.nan)


def all_rows(n):
    return np.full(oracle.ROWS, n, np.int32)


def close(actual, name, key):
    """To 1e-4 where values are of order 1; MiniMax's slowest state sums to about 50."""
    np.testing.assert_allclose(actual, GOLDENS[f"{name}.{key}"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [c.name for c in oracle.CASES if c.family != "lightning"])
def test_layer_equals_transformers_in_one_piece_and_in_pieces_with_decode(name):
    layer, x = Layer(CASES[name]), oracle.inputs(CASES[name])

    out, whole = layer.prefill(padded(x), layer.fresh(), all_rows(oracle.TOKENS))
    outs, state = [], layer.fresh()
    for piece in np.split(x, np.cumsum(oracle.PIECES)[:-1], axis=1):
        n = piece.shape[1]
        if n == 1:
            piece_out, state = layer.step(piece, state)
        else:
            piece_out, state = layer.prefill(padded(piece), state, all_rows(n))
        outs.append(piece_out[:, :n])

    close(out[:, : oracle.TOKENS], name, "out")
    close(np.concatenate(outs, axis=1), name, "out")
    for temporal, convs in (whole, state):
        close(temporal, name, "temporal")
        if convs:
            close(np.concatenate(convs, axis=-1), name, "conv")


@pytest.mark.parametrize("name", [c.name for c in oracle.CASES if c.family == "lightning"])
def test_bailing_lightning_equals_the_quadratic_form(name):
    case = CASES[name]
    q, k, v = oracle.mixer_inputs(case)
    tokens = GLATokens(*(padded(x) for x in (q * case.key_dim**-0.5, k, v)))
    log_decay = bailing_log_decay(case.heads, case.layer_idx, case.num_layers)
    state = np.zeros((oracle.ROWS, case.heads, case.key_dim, case.value_dim), np.float32)

    out, state = jax.jit(partial(gla_prefill, implementation="xla"))(
        tokens, log_decay, state, all_rows(oracle.TOKENS)
    )

    close(out[:, : oracle.TOKENS], name, "out")
    close(state, name, "temporal")
