"""Tiny hybrid models whose weights come from their tensors' names alone: the goldens' maker and the
tests build the same checkpoint without storing it. Configs and tensor names are the published ones.
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
    "hidden_act": "silu",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 8}

_GDN: dict[str, Any] = _COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25},
    "attention_bias": False,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_QWEN_EXPERTS = _EXPERTS | {"shared_expert_intermediate_size": 24, "num_experts_per_tok": 3}
_QWEN3_NEXT = _GDN | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}

_MLA: dict[str, Any] = _COMMON | {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_KIMI = (
    _MLA
    | _EXPERTS
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "model_max_length": 512,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "num_expert_group": 4,
        "topk_group": 2,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.5,
    }
)
del _KIMI["max_position_embeddings"]
_BAILING = (
    _MLA
    | _EXPERTS
    | {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "rope_theta": 10000.0,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "num_nextn_predict_layers": 0,
    }
)
_LING25 = {k: v for k, v in _BAILING.items() if not k.startswith(("kda_", "short_conv"))} | {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "group_norm_size": 2,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "num_hidden_layers": 3,
}
_MINIMAX: dict[str, Any] = _COMMON | {
    "architectures": ["MiniMaxForCausalLM"],
    "model_type": "minimax",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": _ROPE,
    "layer_types": ["full_attention", "linear_attention"] * 2,
    "block_size": 32,
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.9,
    "linear_attn_alpha_factor": 1.2,
    "linear_attn_beta_factor": 1.1,
    "mlp_alpha_factor": 0.8,
    "mlp_beta_factor": 1.4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": _QWEN3_NEXT
    | _QWEN_EXPERTS
    | {
        "num_hidden_layers": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "qwen3_next_dense": _QWEN3_NEXT
    | {
        "num_experts": 0,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
    },
    "qwen3_5": _GDN
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 2,
    },
    "qwen3_5_moe": _GDN
    | _QWEN_EXPERTS
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 2,
    },
    "kimi": _KIMI
    | {
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "kimi_dense": _KIMI
    | {
        "q_lora_rank": 20,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense"] * 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 3,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 3,
    },
    "minimax": _MINIMAX | {"num_hidden_layers": 2, "layer_types": _MINIMAX["layer_types"][:2]},
    "minimax_3_heads": _MINIMAX
    | {"num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 3}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "bailing_3": _BAILING | {"num_hidden_layers": 3},
    "bailing_3_dense": _BAILING
    | {
        "q_lora_rank": 20,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "kda_safe_gate": False,
        "head_dim": 8,
        "short_conv_kernel_size": 3,
    },
    "bailing_25": _LING25,
    "bailing_25_dense": _LING25
    | {
        "q_lora_rank": 20,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "group_norm_size": 3,
        "use_qk_norm": False,
    },
}
# Not smaller: XLA's CPU products of smaller heads have other bits for other numbers of rows.
_EXACT_GDN = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_EXACT_KDA = {"num_heads": 2, "head_dim": 64, "short_conv_kernel_size": 4}
EXACT_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": CONFIGS["qwen3_next"] | _EXACT_GDN,
    "kimi": CONFIGS["kimi"]
    | {"linear_attn_config": CONFIGS["kimi"]["linear_attn_config"] | _EXACT_KDA},
    "minimax": CONFIGS["minimax"],
    "bailing_25": CONFIGS["bailing_25"],
}
"""Without goldens: for comparing bits."""


def golden_token_ids(name: str) -> np.ndarray:
    """int32[GOLDEN_TOKENS] of one case."""
    draws = tiny.uniform(f"tokens of {name}", (GOLDEN_TOKENS,))
    return ((draws + 1) / 2 * CONFIGS[name]["vocab_size"]).astype(np.int32)


def tensors(config: Config) -> dict[str, np.ndarray]:
    """The whole checkpoint, float32, under the names published checkpoints use."""
    centered = "linear_num_key_heads" in config
    return {name: _tensor(name, shape, centered) for name, shape in _shapes(config).items()}


def write_checkpoint(folder: Path, config: Config, weights: Mapping[str, np.ndarray]) -> Path:
    """Writes config.json and model.safetensors; returns the folder."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
    return folder


def is_linear(config: Config, index: int) -> bool:
    """Whether layer `index` is recurrent."""
    if "linear_attn_config" in config:
        return index + 1 in config["linear_attn_config"]["kda_layers"]
    if "layer_types" in config:
        return config["layer_types"][index] == "linear_attention"
    group = config.get("full_attention_interval") or config["layer_group_size"]
    whole = config["num_hidden_layers"] // group * group
    is_tail = "group_norm_size" in config and index >= whole
    return (index + 1) % group != 0 and not is_tail


def _tensor(name: str, shape: tuple[int, ...], centered: bool) -> np.ndarray:
    """Matrices keep activations near 1; norms are near 1 (stored as the distance from it when
    `centered`), biases small; decay rates between 0.4 and 2.7."""
    values = tiny.uniform(name, shape)
    if name.endswith("norm.weight"):
        whole = not centered or name.endswith("linear_attn.norm.weight")
        values = 0.2 * values + whole
    elif name.endswith("bias") and "dt_bias" not in name:
        values = 0.3 * values
    elif not name.endswith(("A_log", "dt_bias")) and "embed" not in name:
        values = values * sqrt(3 / shape[-1])
    return values.astype(np.float32)


def _shapes(config: Config) -> Shapes:
    hidden, vocab, kind = config["hidden_size"], config["vocab_size"], config["model_type"]
    bailing = kind == "bailing_hybrid"
    embedding = "word_embeddings" if bailing else "embed_tokens"
    shapes: Shapes = {f"model.{embedding}.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear = is_linear(config, i)
        if kind.startswith("qwen"):
            mixer = _gdn(config) if linear else _gated_attention(config)
            shapes |= _under(f"{layer}.{'linear_attn' if linear else 'self_attn'}", mixer)
            shapes |= _under(f"{layer}.mlp", _qwen_feed_forward(config, i))
        elif kind == "minimax":
            shapes |= _under(f"{layer}.self_attn", (_lightning if linear else _gqa)(config))
            shapes |= _under(f"{layer}.block_sparse_moe", _mixtral(config))
        else:
            mixer = _bailing_or_kimi(config, linear)
            shapes |= _under(f"{layer}.{'attention' if bailing else 'self_attn'}", mixer)
            shapes |= _under(layer, _deepseek_feed_forward(config, i))
    return shapes


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _matrices(**sizes: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": shape for name, shape in sizes.items()}


def _mlp(hidden: int, size: int) -> Shapes:
    return _matrices(gate_proj=(size, hidden), up_proj=(size, hidden), down_proj=(hidden, size))


def _gdn(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    key = key_heads * config["linear_key_head_dim"]
    value = heads * config["linear_value_head_dim"]
    shapes = {"A_log": (heads,), "dt_bias": (heads,)} | _matrices(
        conv1d=(2 * key + value, 1, config["linear_conv_kernel_dim"]),
        norm=(config["linear_value_head_dim"],),
        out_proj=(hidden, value),
    )
    if config["model_type"] == "qwen3_next":
        return shapes | _matrices(
            in_proj_qkvz=(2 * key + 2 * value, hidden), in_proj_ba=(2 * heads, hidden)
        )
    return shapes | _matrices(
        in_proj_qkv=(2 * key + value, hidden),
        in_proj_z=(value, hidden),
        in_proj_b=(heads, hidden),
        in_proj_a=(heads, hidden),
    )


def _gqa(config: Config) -> Shapes:
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return _matrices(
        q_proj=(q, hidden), k_proj=(kv, hidden), v_proj=(kv, hidden), o_proj=(hidden, q)
    )


def _gated_attention(config: Config) -> Shapes:
    dim = config["head_dim"]
    q = 2 * config["num_attention_heads"] * dim
    return _gqa(config) | _matrices(q_proj=(q, config["hidden_size"]), q_norm=(dim,), k_norm=(dim,))


def _qwen_feed_forward(config: Config, index: int) -> Shapes:
    hidden = config["hidden_size"]
    if not config.get("num_experts") or index in config.get("mlp_only_layers", ()):
        return _mlp(hidden, config["intermediate_size"])
    shapes = _matrices(gate=(config["num_experts"], hidden), shared_expert_gate=(1, hidden))
    shapes |= _under("shared_expert", _mlp(hidden, config["shared_expert_intermediate_size"]))
    for e in range(config["num_experts"]):
        shapes |= _under(f"experts.{e}", _mlp(hidden, config["moe_intermediate_size"]))
    return shapes


def _lightning(config: Config) -> Shapes:
    hidden, width = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    return _matrices(
        qkv_proj=(3 * width, hidden),
        out_proj=(hidden, width),
        output_gate=(width, hidden),
        norm=(width,),
    )


def _mixtral(config: Config) -> Shapes:
    hidden, size = config["hidden_size"], config["intermediate_size"]
    shapes = _matrices(gate=(config["num_local_experts"], hidden))
    for e in range(config["num_local_experts"]):
        shapes |= _under(
            f"experts.{e}", _matrices(w1=(size, hidden), w2=(hidden, size), w3=(size, hidden))
        )
    return shapes


def _bailing_or_kimi(config: Config, linear: bool) -> Shapes:
    hidden = config["hidden_size"]
    if "group_norm_size" in config:
        return _ling25_linear(config) if linear else _mla(config, "dense")
    if config["model_type"] == "bailing_hybrid":
        if not linear:
            gate = _matrices(g_proj=(config["num_attention_heads"], hidden))
            return _mla(config, "dense") | gate
        heads, dim = config["num_attention_heads"], config["head_dim"]
        gates = _matrices(f_proj=(heads * dim, hidden), g_proj=(heads * dim, hidden))
        kernel = config["short_conv_kernel_size"]
        return _kda(hidden, heads, dim, kernel) | gates | {"A_log": (heads,)}
    if not linear:
        return _mla(config, "o_proj")
    sizes = config.get("linear_attn_config") or {
        "num_heads": config["linear_num_heads"],
        "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }
    heads, dim = sizes["num_heads"], sizes["head_dim"]
    gates = _matrices(
        f_a_proj=(dim, hidden),
        f_b_proj=(heads * dim, dim),
        g_a_proj=(dim, hidden),
        g_b_proj=(heads * dim, dim),
    )
    kda = _kda(hidden, heads, dim, sizes["short_conv_kernel_size"])
    return kda | gates | {"A_log": (1, 1, heads, 1)}


def _kda(hidden: int, heads: int, dim: int, kernel: int) -> Shapes:
    width = heads * dim
    shapes: Shapes = {"dt_bias": (width,)}
    for name in "qkv":
        shapes[f"{name}_proj.weight"] = (width, hidden)
        shapes[f"{name}_conv1d.weight"] = (width, 1, kernel)
    return shapes | _matrices(b_proj=(heads, hidden), o_norm=(dim,), o_proj=(hidden, width))


def _ling25_linear(config: Config) -> Shapes:
    hidden, dim = config["hidden_size"], config["head_dim"]
    width = config["num_attention_heads"] * dim
    shapes = _matrices(
        query_key_value=(3 * width, hidden),
        g_proj=(width, hidden),
        dense=(hidden, width),
        g_norm=(width,),
    )
    if config["use_qk_norm"]:
        shapes |= _matrices(query_layernorm=(dim,), key_layernorm=(dim,))
    return shapes


def _mla(config: Config, out: str) -> Shapes:
    hidden, heads, rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, value = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    q_rank, q_out = config["q_lora_rank"], heads * (nope + rope)
    query = (
        _matrices(q_proj=(q_out, hidden))
        if q_rank is None
        else _matrices(q_a_proj=(q_rank, hidden), q_a_layernorm=(q_rank,), q_b_proj=(q_out, q_rank))
    )
    return query | _matrices(
        kv_a_proj_with_mqa=(rank + rope, hidden),
        kv_a_layernorm=(rank,),
        kv_b_proj=(heads * (nope + value), rank),
        **{out: (hidden, heads * value)},
    )


def _deepseek_feed_forward(config: Config, index: int) -> Shapes:
    """Under the layer: mlp when dense; else mlp (Ling) or block_sparse_moe (Kimi)."""
    hidden, count = config["hidden_size"], config["num_experts"]
    kinds = config.get("mlp_layer_types")
    dense = kinds[index] == "dense" if kinds else index < config["first_k_dense_replace"]
    if dense:
        return _under("mlp", _mlp(hidden, config["intermediate_size"]))
    size = config["moe_intermediate_size"]
    kimi = config["model_type"] == "kimi_linear"
    bias = "e_score_correction_bias" if kimi else "expert_bias"
    shapes: Shapes = {"gate.weight": (count, hidden), f"gate.{bias}": (count,)}
    shapes |= _under("shared_experts", _mlp(hidden, size * config["num_shared_experts"]))
    for e in range(count):
        expert = _mlp(hidden, size)
        if kimi:
            expert = _matrices(w1=(size, hidden), w2=(hidden, size), w3=(size, hidden))
        shapes |= _under(f"experts.{e}", expert)
    return _under("block_sparse_moe" if kimi else "mlp", shapes)
