"""Tiny Mamba-2 hybrids whose weights come from their tensors' names alone: the goldens' maker and
the tests build the same checkpoint without storing it. Configs and tensor names are the published
ones."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np

if __package__:
    from tests.oracle import tiny
else:
    import tiny

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
GOLDEN_TOKENS = 140

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BAMBA = _COMMON | {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "attn_layer_indices": [1],
    "mlp_bias": False,
}
_GRANITE = _COMMON | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "position_embedding_type": "nope",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": _BAMBA,
    "bamba_groups_and_biases": _BAMBA
    | {
        "attn_layer_indices": [0],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_conv": 3,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "granite": _GRANITE,
    "granite_dense_rope": _GRANITE
    | {
        "layer_types": ["attention", "mamba"],
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_groups": 2,
        "tie_word_embeddings": True,
    },
}


def golden_token_ids(name: str) -> np.ndarray:
    """int32[GOLDEN_TOKENS] of one case."""
    draws = tiny.uniform(f"tokens of {name}", (GOLDEN_TOKENS,))
    return ((draws + 1) / 2 * CONFIGS[name]["vocab_size"]).astype(np.int32)


def tensors(config: Config) -> dict[str, np.ndarray]:
    """The whole checkpoint, float32, under the names published checkpoints use."""
    return {name: _tensor(name, shape) for name, shape in _shapes(config).items()}


def is_mamba(config: Config, index: int) -> bool:
    """Whether layer `index` is recurrent."""
    if "layer_types" in config:
        return config["layer_types"][index] == "mamba"
    return index not in config["attn_layer_indices"]


def conv_channels(config: Config) -> int:
    """Of x, B and C together."""
    state = config["mamba_n_groups"] * config["mamba_d_state"]
    return config["mamba_expand"] * config["hidden_size"] + 2 * state


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices keep activations near 1; norms are near 1, biases small; a token decays a state by
    a factor between 0.1 and 0.99."""
    values = tiny.uniform(name, shape)
    if "norm" in name:
        values = 1 + 0.2 * values
    elif name.endswith("dt_bias"):
        values = 1.5 * values - 2
    elif name.endswith(".bias"):
        values = 0.3 * values
    elif not name.endswith(("A_log", ".D")) and "embed" not in name:
        values = values * sqrt(3 / shape[-1])
    return values.astype(np.float32)


def _shapes(config: Config) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    bamba = config["model_type"] == "bamba"
    last_norm = "final_layernorm" if bamba else "norm"
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        f"model.{last_norm}.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        mamba = is_mamba(config, i)
        parts = {
            "input_layernorm.weight": (hidden,),
            f"{'pre_ff' if bamba else 'post_attention'}_layernorm.weight": (hidden,),
            **_under("mamba" if mamba else "self_attn", (_mamba if mamba else _attention)(config)),
            **(_bamba_feed_forward if bamba else _granite_feed_forward)(config),
        }
        shapes |= _under(f"model.layers.{i}", parts)
    return shapes


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _matrix(name: str, out: int, into: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def _mamba(config: Config) -> Shapes:
    hidden, heads, bias = config["hidden_size"], config["mamba_n_heads"], config["mamba_proj_bias"]
    width, channels = config["mamba_expand"] * hidden, conv_channels(config)
    shapes: Shapes = {name: (heads,) for name in ("A_log", "D", "dt_bias")}
    shapes |= {"conv1d.weight": (channels, 1, config["mamba_d_conv"]), "norm.weight": (width,)}
    if config["mamba_conv_bias"]:
        shapes["conv1d.bias"] = (channels,)
    return (
        shapes
        | _matrix("in_proj", width + channels + heads, hidden, bias)
        | _matrix("out_proj", hidden, width, bias)
    )


def _attention(config: Config) -> Shapes:
    hidden, bias = config["hidden_size"], config["attention_bias"]
    dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * dim
    return (
        _matrix("q_proj", hidden, hidden, bias)
        | _matrix("k_proj", kv, hidden, bias)
        | _matrix("v_proj", kv, hidden, bias)
        | _matrix("o_proj", hidden, hidden, bias)
    )


def _bamba_feed_forward(config: Config) -> Shapes:
    hidden, size, bias = config["hidden_size"], config["intermediate_size"], config["mlp_bias"]
    return _under(
        "feed_forward",
        _matrix("gate_proj", size, hidden, bias)
        | _matrix("up_proj", size, hidden, bias)
        | _matrix("down_proj", hidden, size, bias),
    )


def _granite_feed_forward(config: Config) -> Shapes:
    hidden, size, count = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    shared = config["shared_intermediate_size"]
    shapes = _under(
        "shared_mlp",
        _matrix("input_linear", 2 * shared, hidden) | _matrix("output_linear", hidden, shared),
    )
    if count:
        shapes |= _under(
            "block_sparse_moe",
            _matrix("router.layer", count, hidden)
            | {
                "input_linear.weight": (count, 2 * size, hidden),
                "output_linear.weight": (count, hidden, size),
            },
        )
    return shapes
