"""The shipped kit on the backends that uhrc-recurrent brings: KDA, GDN and GLA."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from uhrc_core.testing import RecurrentBackendConformance
from uhrc_recurrent.backends import (
    BUILTIN_BACKENDS,
    GDN,
    GLA,
    KDA,
    GDNParams,
    GLAParams,
    KDAParams,
)
from uhrc_recurrent.kernels.conv1d import conv1d_prefill, conv1d_step
from uhrc_recurrent.kernels.delta import DeltaTokens
from uhrc_recurrent.kernels.gdn import gdn_prefill, gdn_step
from uhrc_recurrent.kernels.gla import GLATokens, gla_prefill, gla_step
from uhrc_recurrent.kernels.kda import kda_prefill, kda_step

HEADS, DIM, CONV_KERNEL = 2, 8, 4


class DeltaConformance(RecurrentBackendConformance):
    """KDA and GDN: a convolution each for q, k and v, then the delta rule."""

    key_heads: int
    decay_dim: int
    run_prefill: object
    run_step: object

    @property
    def channels(self):
        return (self.key_heads * DIM, self.key_heads * DIM, HEADS * DIM)

    def random_inputs(self, rng, rows, width):
        """q, k, v before the convolution; the gates after their projections."""
        normal = rng.standard_normal
        return {
            "qkv": tuple(normal((rows, width, n), np.float32) for n in self.channels),
            "log_decay": -np.exp(normal((rows, width, HEADS, self.decay_dim), np.float32) - 1),
            "beta": 1 / (1 + np.exp(-normal((rows, width, HEADS, 1), np.float32))),
        }

    def weights(self):
        rng = np.random.default_rng(7)
        return [rng.standard_normal((n, CONV_KERNEL), np.float32) for n in self.channels]

    def tokens(self, inputs, convolved):
        heads = (self.key_heads, self.key_heads, HEADS)
        parts = zip(convolved, heads, strict=True)
        q, k, v = (x.reshape(*x.shape[:-1], n, -1) for x, n in parts)
        return DeltaTokens(q, k, v, inputs["log_decay"], inputs["beta"])

    def prefill(self, inputs, state, lens):
        triples = zip(inputs["qkv"], self.weights(), state.convs, strict=True)
        runs = [conv1d_prefill(x, w, conv, lens) for x, w, conv in triples]
        convolved, convs = zip(*runs, strict=True)
        tokens = self.tokens(inputs, convolved)
        out, temporal = type(self).run_prefill(tokens, state.temporal, lens)
        return out, (temporal, convs)

    def step(self, inputs, state):
        triples = zip(inputs["qkv"], self.weights(), state.convs, strict=True)
        convolved, convs = zip(*(conv1d_step(x, w, conv) for x, w, conv in triples), strict=True)
        out, temporal = type(self).run_step(self.tokens(inputs, convolved), state.temporal)
        return out, (temporal, convs)


class TestKDA(DeltaConformance):
    spec = KDA
    params = KDAParams(num_heads=HEADS, head_dim=DIM, conv_kernel=CONV_KERNEL)
    hf_configs = (
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 4,
            "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
        },
        {
            "model_type": "bailing_hybrid",
            "num_hidden_layers": 10,
            "num_attention_heads": 16,
            "hidden_size": 2048,
            "layer_group_size": 4,
            "kda_safe_gate": True,
        },
    )
    key_heads, decay_dim = HEADS, DIM
    run_prefill, run_step = kda_prefill, kda_step


class TestGDN(DeltaConformance):
    spec = GDN
    params = GDNParams(
        num_key_heads=1,
        num_value_heads=HEADS,
        key_head_dim=DIM,
        value_head_dim=DIM,
        conv_kernel=CONV_KERNEL,
    )
    hf_configs = (
        {"model_type": "qwen3_next", "num_hidden_layers": 8},
        {
            "model_type": "qwen3_5",
            "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4},
        },
    )
    key_heads, decay_dim = 1, 1
    run_prefill, run_step = gdn_prefill, gdn_step


class TestGLA(RecurrentBackendConformance):
    spec = GLA
    params = GLAParams(num_heads=HEADS, head_dim=DIM)
    hf_configs = (
        {
            "model_type": "minimax",
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "hidden_size": 64,
        },
        {
            "model_type": "bailing_hybrid",
            "num_hidden_layers": 10,
            "num_attention_heads": 16,
            "hidden_size": 2048,
            "layer_group_size": 4,
            "group_norm_size": 4,
        },
    )
    log_decay = np.array([-0.7, -0.002], np.float32)

    def random_inputs(self, rng, rows, width):
        return GLATokens(
            *(rng.standard_normal((rows, width, HEADS, DIM), np.float32) for _ in "qkv")
        )

    def prefill(self, inputs, state, lens):
        out, temporal = gla_prefill(inputs, jnp.asarray(self.log_decay), state.temporal, lens)
        return out, (temporal, ())

    def step(self, inputs, state):
        out, temporal = gla_step(inputs, jnp.asarray(self.log_decay), state.temporal)
        return out, (temporal, ())


def test_every_backend_of_the_plugin_is_tested_here():
    suites = (TestKDA, TestGDN, TestGLA)
    assert {suite.spec.name for suite in suites} == {spec.name for spec in BUILTIN_BACKENDS}
