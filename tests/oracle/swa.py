"""Tiny sliding-window models whose weights come from their tensors' names alone: the goldens' maker
and the tests build the same checkpoint without storing it. Configs and tensor names are the
published ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

if __package__:
    from tests.oracle import tiny
else:
    import tiny

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
GOLDEN_TOKENS = 140

_COMMON: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = _COMMON | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "head_dim": 8,
    "rope_theta": 10000.0,
}
_QWEN2 = _COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
}
_GEMMA3 = _COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
_GPT_OSS = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "attention_bias": True,
    "swiglu_limit": 0.7,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    # The page is 16 tokens, the widest prefill 192, the sequence 140: windows below, at and above
    # each of them.
    "mistral_5": _MISTRAL | {"sliding_window": 5},
    "mistral_16": _MISTRAL | {"sliding_window": 16},
    "mistral_full": _MISTRAL | {"sliding_window": None, "num_hidden_layers": 2},
    "qwen2": _QWEN2,
    "qwen3": _QWEN2
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": False,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3_7": _GEMMA3
    | {
        "sliding_window": 7,
        "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3_64": _GEMMA3
    | {
        "sliding_window": 64,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "gpt_oss_1": _GPT_OSS | {"sliding_window": 1, "num_hidden_layers": 2},
    "gpt_oss_33": _GPT_OSS | {"sliding_window": 33},
    "gpt_oss_200": _GPT_OSS
    | {
        "sliding_window": 200,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


def golden_token_ids(name: str) -> np.ndarray:
    """int32[GOLDEN_TOKENS] of one case."""
    draws = tiny.uniform(f"tokens of {name}", (GOLDEN_TOKENS,))
    return ((draws + 1) / 2 * CONFIGS[name]["vocab_size"]).astype(np.int32)


def tensors(config: Config) -> dict[str, np.ndarray]:
    """The whole checkpoint, float32, under the names published checkpoints use."""
    return {name: _tensor(config, name, shape) for name, shape in _shapes(config).items()}


def write_checkpoint(folder: Path, config: Config) -> Path:
    """Writes config.json and model.safetensors; returns the folder."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config), folder / "model.safetensors", {"format": "pt"})
    return folder


def _tensor(config: Config, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices keep activations near 1; norms are near 1 (which Gemma stores as 0), sinks near the
    scores, biases small."""
    values = tiny.uniform(name, shape)
    if name.endswith("norm.weight"):
        values = 0.2 * values + (0 if config["model_type"] == "gemma3_text" else 1)
    elif name.endswith("bias"):
        values = 0.3 * values
    elif "experts" in name:  # stored [experts, in, out]
        values = values * sqrt(3 / shape[1])
    elif not name.endswith(("embed_tokens.weight", "sinks")):
        values = values * sqrt(3 / shape[-1])
    return values.astype(np.float32)


def _shapes(config: Config) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    family = config["model_type"]
    for i in range(config["num_hidden_layers"]):
        layer = _attention_shapes(config)
        layer |= {f"{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        if family == "gemma3_text":
            layer |= {
                f"{place}_feedforward_layernorm.weight": (hidden,) for place in ("pre", "post")
            }
        layer |= _expert_shapes(config) if family == "gpt_oss" else _mlp_shapes(config)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention_shapes(config: Config) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    q_size, kv_size = heads * dim, config["num_key_value_heads"] * dim
    family = config["model_type"]
    shapes: Shapes = {}
    for name, out, into in (
        ("q", q_size, hidden),
        ("k", kv_size, hidden),
        ("v", kv_size, hidden),
        ("o", hidden, q_size),
    ):
        shapes[f"self_attn.{name}_proj.weight"] = (out, into)
        if family == "gpt_oss" or (family == "qwen2" and name != "o"):
            shapes[f"self_attn.{name}_proj.bias"] = (out,)
    if family in ("gemma3_text", "qwen3"):
        shapes |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    if family == "gpt_oss":
        shapes["self_attn.sinks"] = (heads,)
    return shapes


def _mlp_shapes(config: Config) -> Shapes:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    return {
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }


def _expert_shapes(config: Config) -> Shapes:
    hidden, wide, count = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    return {
        "mlp.router.weight": (count, hidden),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * wide),
        "mlp.experts.gate_up_proj_bias": (count, 2 * wide),
        "mlp.experts.down_proj": (count, wide, hidden),
        "mlp.experts.down_proj_bias": (count, hidden),
    }
