"""The conformance kit that uhrc-core ships, on this backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from uhrc_core.testing import RecurrentBackendConformance
from uhrc_mamba2.backend import MAMBA2, Mamba2Params
from uhrc_mamba2.ssd import SSDTokens, mamba2_prefill, mamba2_step
from uhrc_recurrent.kernels.conv1d import conv1d_prefill, conv1d_step

PARAMS = Mamba2Params(num_heads=4, head_dim=8, state_size=6, num_groups=2, conv_kernel=4)
CHANNELS = (PARAMS.channels, PARAMS.group_channels, PARAMS.group_channels)
A = -np.array([0.02, 0.5, 2.0, 8.0], np.float32)


class TestMamba2(RecurrentBackendConformance):
    spec = MAMBA2
    params = PARAMS
    hf_configs = (
        {
            "model_type": "bamba",
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "attn_layer_indices": [2],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
        },
        {
            "model_type": "granitemoehybrid",
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": "auto",
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
        },
    )

    def random_inputs(self, rng: np.random.Generator, rows: int, width: int) -> Any:
        """x, B and C before the convolution; the time step after its softplus."""
        normal = partial(rng.standard_normal, dtype=np.float32)
        return {
            "xbc": tuple(normal((rows, width, size)) for size in CHANNELS),
            "dt": np.logaddexp(0, normal((rows, width, PARAMS.num_heads, 1)) - 1),
        }

    def prefill(self, inputs: Any, state: Any, lens: Any) -> tuple[Any, Any]:
        def conv(x: Any, weight: Any, state: Any, bias: Any) -> Any:
            return conv1d_prefill(x, weight, state, lens, bias)

        tokens, convs = self._convolved(conv, inputs, state.convs)
        out, temporal = mamba2_prefill(tokens, jnp.asarray(A), state.temporal, lens)
        return out, (temporal, convs)

    def step(self, inputs: Any, state: Any) -> tuple[Any, Any]:
        tokens, convs = self._convolved(conv1d_step, inputs, state.convs)
        out, temporal = mamba2_step(tokens, jnp.asarray(A), state.temporal)
        return out, (temporal, convs)

    def _convolved(self, conv: Any, inputs: Any, states: Any) -> tuple[SSDTokens, Any]:
        rng = np.random.default_rng(7)
        runs: list[Any] = []
        for x, state, size in zip(inputs["xbc"], states, CHANNELS, strict=True):
            weight = rng.standard_normal((size, PARAMS.conv_kernel), np.float32)
            bias = rng.standard_normal(size, np.float32)
            runs.append(conv(x, weight, state, bias))
        (x, b, c), convs = zip(*runs, strict=True)
        heads = (*x.shape[:-1], PARAMS.num_heads, PARAMS.head_dim)
        groups = (*x.shape[:-1], PARAMS.num_groups, PARAMS.state_size)
        tokens = SSDTokens(x.reshape(heads), inputs["dt"], b.reshape(groups), c.reshape(groups))
        return tokens, convs
