"""Tiny models whose weights come from their tensors' names alone: the goldens' makers and the tests
build the same checkpoint without storing it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDEN_TOKENS = 140
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
    "beta_fast": 32,
    "beta_slow": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama_mha": _LLAMA,
    "llama_gqa_untied": _LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "llama_bias": _LLAMA | {"num_key_value_heads": 1, "attention_bias": True},
    "llama_head_dim_linear": _LLAMA
    | {"head_dim": 12, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama_llama3": _LLAMA
    | {
        "num_key_value_heads": 2,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_yarn": _LLAMA
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "deepseek_v2_lite": _DEEPSEEK | {"rope_scaling": _YARN},
    "deepseek_v2_q_lora": _DEEPSEEK | {"q_lora_rank": 20, "num_hidden_layers": 2},
}


def golden_token_ids(name: str) -> np.ndarray:
    """int32[GOLDEN_TOKENS] of one case."""
    draws = uniform(f"tokens of {name}", (GOLDEN_TOKENS,))
    return ((draws + 1) / 2 * CONFIGS[name]["vocab_size"]).astype(np.int32)


def tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The whole checkpoint, float32, under the names published checkpoints use."""
    shapes = _deepseek_shapes(config) if "kv_lora_rank" in config else _llama_shapes(config)
    return {name: _tensor(name, shape) for name, shape in shapes.items()}


def write_checkpoint(folder: Path, name: str) -> Path:
    """Writes config.json and model.safetensors of one case; returns the folder."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    save_file(tensors(CONFIGS[name]), folder / "model.safetensors", {"format": "pt"})
    return folder


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 in [-1, 1) drawn from the name."""
    return np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).random(shape) * 2 - 1


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices keep activations near 1; norms are near 1, biases small."""
    values = uniform(name, shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.2 * values
    elif name.endswith(".bias"):
        values = 0.3 * values
    elif "embed_tokens" not in name:
        values = values * sqrt(3 / shape[-1])
    return values.astype(np.float32)


def _common_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"model.layers.{i}.post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


def _llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes, hidden = _common_shapes(config), config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    for i in range(config["num_hidden_layers"]):
        attention = f"model.layers.{i}.self_attn"
        for name, out, into in (
            ("q", heads * dim, hidden),
            ("k", kv_heads * dim, hidden),
            ("v", kv_heads * dim, hidden),
            ("o", hidden, heads * dim),
        ):
            shapes[f"{attention}.{name}_proj.weight"] = (out, into)
            if config["attention_bias"]:
                shapes[f"{attention}.{name}_proj.bias"] = (out,)
        shapes |= _mlp_shapes(f"model.layers.{i}.mlp", hidden, config["intermediate_size"])
    return shapes


def _deepseek_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes, hidden = _common_shapes(config), config["hidden_size"]
    heads, rank, q_rank = (
        config[key] for key in ("num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    nope, rope, value = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    small = config["moe_intermediate_size"]
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        q_out = heads * (nope + rope)
        if q_rank is None:
            shapes[f"{attention}.q_proj.weight"] = (q_out, hidden)
        else:
            shapes[f"{attention}.q_a_proj.weight"] = (q_rank, hidden)
            shapes[f"{attention}.q_a_layernorm.weight"] = (q_rank,)
            shapes[f"{attention}.q_b_proj.weight"] = (q_out, q_rank)
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (rank + rope, hidden)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (rank,)
        shapes[f"{attention}.kv_b_proj.weight"] = (heads * (nope + value), rank)
        shapes[f"{attention}.o_proj.weight"] = (hidden, heads * value)
        if i < config["first_k_dense_replace"]:
            shapes |= _mlp_shapes(mlp, hidden, config["intermediate_size"])
            continue
        shapes[f"{mlp}.gate.weight"] = (config["n_routed_experts"], hidden)
        for e in range(config["n_routed_experts"]):
            shapes |= _mlp_shapes(f"{mlp}.experts.{e}", hidden, small)
        shapes |= _mlp_shapes(f"{mlp}.shared_experts", hidden, small * config["n_shared_experts"])
    return shapes
