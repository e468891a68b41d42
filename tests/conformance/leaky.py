"""The leaky integrator that the tests of the kit plant faults in: a state and a convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_core.registry.hf_config import num_layers_of, size_of
from uhrc_core.registry.recurrent import (
    BufferShape,
    RecurrentBackendSpec,
    RecurrentModel,
    StateLayout,
    conv_buffers,
)
from uhrc_core.registry.tables import ConfigTable, PositiveInt
from uhrc_core.testing import RecurrentBackendConformance


class LeakyParams(ConfigTable):
    """Sizes of one layer."""

    num_heads: PositiveInt
    head_dim: PositiveInt


def state_layout(params):
    channels = params.num_heads * params.head_dim
    temporal = BufferShape("temporal", (params.num_heads, 1, params.head_dim), "float32")
    return StateLayout(temporal, conv_buffers(2, conv=channels))


def matches_hf_config(hf_config):
    if hf_config.get("model_type") != "leaky":
        return None
    params = LeakyParams(
        num_heads=size_of(hf_config, "num_heads"), head_dim=size_of(hf_config, "head_dim")
    )
    num_layers = num_layers_of(hf_config)
    return RecurrentModel(params, tuple(range(num_layers)), num_layers)


LEAKY = RecurrentBackendSpec("leaky", LeakyParams, state_layout, matches_hf_config)
DECAY = np.linspace(0.5, 0.9, 3, dtype=np.float32)


class LeakyConformance(RecurrentBackendConformance):
    """s <- decay s + (x_t + x_(t-1)); out = s. The state: s, and the last x."""

    spec = LEAKY
    params = LeakyParams(num_heads=2, head_dim=3)
    hf_configs = ({"model_type": "leaky", "num_hidden_layers": 2, "num_heads": 2, "head_dim": 3},)

    def random_inputs(self, rng, rows, width):
        return rng.standard_normal((rows, width, 6), np.float32)

    def step(self, inputs, state):
        (last,) = state.convs
        x = (inputs + last[:, 0]).astype(jnp.float32).reshape(-1, 2, 1, 3)
        temporal = DECAY * state.temporal + x
        return temporal[:, :, 0], state._replace(temporal=temporal, convs=(inputs[:, None],))

    def prefill(self, inputs, state, lens):
        def body(state, at):
            position, x = at
            out, new = self.step(x, state)
            return jax.tree.map(lambda a, b: keep(position < lens, a, b), new, state), out

        by_token = (jnp.arange(inputs.shape[1]), jnp.moveaxis(inputs, 1, 0))
        state, out = jax.lax.scan(body, state, by_token)
        return jnp.moveaxis(out, 0, 1), state


def keep(flags, x, y):
    return jnp.where(flags.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
