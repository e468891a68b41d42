"""Linear-attention layers whose weights and inputs come from their names alone, so that the golden
file holds only what the oracle computed. numpy only; read by make_recurrent.py and by the tests."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from math import sqrt

import numpy as np

TOKENS = 140
PIECES = (37, 66, 1, 1, 27, 8)
"""How the tokens are cut for the run with a cache; a piece of 1 token is a decode step."""
ROWS = 2
HIDDEN = 24


@dataclass(frozen=True)
class Case:
    """One layer. `family` is the transformers model: kimi_linear, bailing_hybrid, qwen3_next,
    qwen3_5, minimax; or lightning, a bare recurrence."""

    name: str
    family: str
    heads: int
    """Value heads."""
    key_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 1
    safe_gate: bool = False
    layer_idx: int = 1
    num_layers: int = 4
    extra: dict[str, int] = field(default_factory=dict)

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.heads * self.value_dim


CASES = (
    Case("kimi", "kimi_linear", 2, 2, 16, 16, conv_kernel=4),
    Case("kimi_conv3", "kimi_linear", 3, 3, 8, 8, conv_kernel=3),
    Case("ling3_safe_gate", "bailing_hybrid", 2, 2, 16, 16, conv_kernel=4, safe_gate=True),
    Case("qwen3_next", "qwen3_next", 4, 2, 16, 8, conv_kernel=4),
    Case("qwen3_5_conv2", "qwen3_5", 3, 1, 8, 16, conv_kernel=2),
    Case("minimax", "minimax", 4, 4, 8, 8),
    Case("minimax_3_heads", "minimax", 3, 3, 8, 8, layer_idx=3),
    Case("ling25", "lightning", 4, 4, 8, 8, layer_idx=0),
    Case("ling25_6_heads", "lightning", 6, 6, 8, 8, layer_idx=2),
)


def weights(case: Case) -> dict[str, np.ndarray]:
    """The layer's parameters, float32, under the names of its module's state_dict."""
    return {name: _tensor(f"{case.name}.{name}", shape) for name, shape in _shapes(case).items()}


def inputs(case: Case) -> np.ndarray:
    """float32[ROWS, TOKENS, HIDDEN]."""
    return _draw(f"{case.name} inputs", (ROWS, TOKENS, HIDDEN)).astype(np.float32) * 2


def mixer_inputs(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of a bare recurrence: float32[ROWS, TOKENS, heads, dim] each."""
    shape = (ROWS, TOKENS, case.heads, case.key_dim)
    q, k, v = (_draw(f"{case.name} {x}", shape).astype(np.float32) for x in "qkv")
    return q, k, v


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 in [-1, 1) drawn from the name."""
    return np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).random(shape) * 2 - 1


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices keep activations near 1; norms are near 1; decay rates between 0.4 and 2.7."""
    values = _draw(name, shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.2 * values
    elif not name.endswith(("A_log", "dt_bias")):
        values = values * sqrt(3 / shape[-1])
    return values.astype(np.float32)


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    key, value, heads = case.key_width, case.value_width, case.heads
    kernel = case.conv_kernel
    if case.family in ("kimi_linear", "bailing_hybrid"):
        return _kda_shapes(case)
    if case.family == "minimax":
        return {
            "norm.weight": (value,),
            "qkv_proj.weight": (3 * value, HIDDEN),
            "out_proj.weight": (HIDDEN, value),
            "output_gate.weight": (value, HIDDEN),
        }
    gdn: dict[str, tuple[int, ...]] = {
        "dt_bias": (heads,),
        "A_log": (heads,),
        "conv1d.weight": (2 * key + value, 1, kernel),
        "norm.weight": (case.value_dim,),
        "out_proj.weight": (HIDDEN, value),
    }
    if case.family == "qwen3_next":
        return gdn | {
            "in_proj_qkvz.weight": (2 * key + 2 * value, HIDDEN),
            "in_proj_ba.weight": (2 * heads, HIDDEN),
        }
    return gdn | {
        "in_proj_qkv.weight": (2 * key + value, HIDDEN),
        "in_proj_z.weight": (value, HIDDEN),
        "in_proj_b.weight": (heads, HIDDEN),
        "in_proj_a.weight": (heads, HIDDEN),
    }


def _kda_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    width, dim, heads = case.key_width, case.key_dim, case.heads
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (width, HIDDEN),
        "k_proj.weight": (width, HIDDEN),
        "v_proj.weight": (width, HIDDEN),
        "conv1d.weight": (3 * width, 1, case.conv_kernel),
        "forget_gate.dt_bias": (width,),
        "b_proj.weight": (heads, HIDDEN),
        "o_norm.weight": (dim,),
        "o_proj.weight": (HIDDEN, width),
    }
    if case.family == "bailing_hybrid":
        return shapes | {
            "forget_gate.A_log": (heads,),
            "forget_gate.f_proj.weight": (width, HIDDEN),
            "g_proj.weight": (width, HIDDEN),
        }
    return shapes | {
        "forget_gate.A_log": (1, 1, heads, 1),
        "forget_gate.f_a_proj.weight": (dim, HIDDEN),
        "forget_gate.f_b_proj.weight": (width, dim),
        "g_a_proj.weight": (dim, HIDDEN),
        "g_b_proj.weight": (width, dim),
    }
