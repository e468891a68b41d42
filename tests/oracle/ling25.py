"""Ling/Ring 2.5 (BailingMoeV2_5ForCausalLM) in float64, from the facts of its published code.

Every pair of tokens at once, no recurrence, no cache, no absorbed matrices: it shares nothing with
what it is the oracle of. Layers: RMSNorm, attention, residual; RMSNorm, feed-forward, residual.

- Linear layers: one query_key_value matrix in the order q, k, v; q and k normed per head
  (`use_qk_norm`); the first `partial_rotary_factor` of a head rotated, pairs (i, i + dim / 2);
  scores (q . k) K^-1/2 decay^(distance), decay = exp(-ALiBi slope * (1 - (layer - 1) / (layers - 1)
  + 1e-5)); the output RMS-normed in `group_norm_size` groups, times sigmoid(g_proj(x)); dense.
- The last layer of each `layer_group_size`, and those after the last whole group: latent attention
  as in DeepSeek-V3, pairs (2i, 2i + 1) rotated.
- The feed-forwards of DeepSeek-V3: dense in the first layers; else sigmoid scores, biased for the
  choice of groups (by the sum of their best two) and experts, renormalised, scaled; shared experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def logits(config: Mapping[str, Any], weights: Weights, ids: np.ndarray) -> np.ndarray:
    """float32[tokens, vocab]."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    eps, group, count = (
        config[key] for key in ("rms_norm_eps", "layer_group_size", "num_hidden_layers")
    )
    x = w["model.word_embeddings.weight"][ids]
    for i in range(count):
        layer = f"model.layers.{i}"
        normed = _norm(x, w[f"{layer}.input_layernorm.weight"], eps)
        is_full = (i + 1) % group == 0 or i >= count // group * group
        part = _part(w, f"{layer}.attention")
        x = x + (_mla(config, part, normed) if is_full else _linear(config, part, normed, i))
        normed = _norm(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
        mlp = _part(w, f"{layer}.mlp")
        dense = i < config["first_k_dense_replace"]
        x = x + (_swiglu(mlp, normed) if dense else _moe(config, mlp, normed))
    x = _norm(x, w["model.norm.weight"], eps)
    return (x @ w["lm_head.weight"].T).astype(np.float32)


def _part(w: Weights, prefix: str) -> dict[str, np.ndarray]:
    start = f"{prefix}."
    return {
        name.removeprefix(start).removesuffix(".weight"): array
        for name, array in w.items()
        if name.startswith(start)
    }


def _norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _swiglu(w: Weights, x: np.ndarray) -> np.ndarray:
    gate = x @ w["gate_proj"].T
    return (gate * _sigmoid(gate) * (x @ w["up_proj"].T)) @ w["down_proj"].T


def _rotate(x: np.ndarray, theta: float, dim: int, interleaved: bool) -> np.ndarray:
    """x [tokens, heads, head_dim]: the first `dim` of each head turned, as complex numbers."""
    frequencies = theta ** -(np.arange(0, dim, 2) / dim)
    turn = np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
    part = x[..., :dim]
    first, second = (
        (part[..., 0::2], part[..., 1::2])
        if interleaved
        else (part[..., : dim // 2], part[..., dim // 2 :])
    )
    turned = (first + 1j * second) * turn
    out = x.copy()
    if interleaved:
        out[..., 0:dim:2], out[..., 1:dim:2] = turned.real, turned.imag
    else:
        out[..., : dim // 2], out[..., dim // 2 : dim] = turned.real, turned.imag
    return out


def _distance(tokens: int) -> np.ndarray:
    return np.arange(tokens)[:, None] - np.arange(tokens)


def _linear(config: Mapping[str, Any], w: Weights, x: np.ndarray, index: int) -> np.ndarray:
    heads, dim, tokens = config["num_attention_heads"], config["head_dim"], len(x)
    qkv = (x @ w["query_key_value"].T).reshape(tokens, 3, heads, dim)
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    if config["use_qk_norm"]:
        q = _norm(q, w["query_layernorm"], config["rms_norm_eps"])
        k = _norm(k, w["key_layernorm"], config["rms_norm_eps"])
    rotated = int(dim * config["partial_rotary_factor"])
    q, k = (_rotate(part, config["rope_theta"], rotated, False) for part in (q, k))
    factor = 1 - (index - 1) / (config["num_hidden_layers"] - 1) + 1e-5
    distance = _distance(tokens)
    decay = np.exp(-np.array(_slopes(heads))[:, None, None] * factor * distance)
    scores = np.einsum("ihd,jhd->hij", q, k) * dim**-0.5 * np.where(distance >= 0, decay, 0)
    out = np.einsum("hij,jhd->ihd", scores, v).reshape(tokens, config["group_norm_size"], -1)
    weight = w["g_norm"].reshape(config["group_norm_size"], -1)
    out = _norm(out, weight, config["rms_norm_eps"]).reshape(tokens, -1)
    return (out * _sigmoid(x @ w["g_proj"].T)) @ w["dense"].T


def _slopes(heads: int) -> list[float]:
    """ALiBi's: a geometric row for a power of two, else filled up from the next one's odd terms."""
    power = 2 ** math.floor(math.log2(heads))
    row = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return row + between[: heads - power]


def _mla(config: Mapping[str, Any], w: Weights, x: np.ndarray) -> np.ndarray:
    heads, rank, nope, rope = (
        config[key]
        for key in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    tokens = len(x)
    if "q_proj" in w:
        q = x @ w["q_proj"].T
    else:
        q = _norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    q = q.reshape(tokens, heads, nope + rope)
    latent = x @ w["kv_a_proj_with_mqa"].T
    kv = (_norm(latent[:, :rank], w["kv_a_layernorm"]) @ w["kv_b_proj"].T).reshape(
        tokens, heads, -1
    )
    theta = config["rope_theta"]
    q_rope = _rotate(q[..., nope:], theta, rope, True)
    k_rope = _rotate(latent[:, None, rank:], theta, rope, True)[:, 0]
    scores = np.einsum("ihd,jhd->hij", q[..., :nope], kv[..., :nope])
    scores = (scores + np.einsum("ihd,jd->hij", q_rope, k_rope)) * (nope + rope) ** -0.5
    scores = np.where(_distance(tokens) >= 0, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores = scores / scores.sum(-1, keepdims=True)
    out = np.einsum("hij,jhd->ihd", scores, kv[..., nope:]).reshape(tokens, -1)
    return out @ w["dense"].T


def _moe(config: Mapping[str, Any], w: Weights, x: np.ndarray) -> np.ndarray:
    groups, top_k = config["n_group"], config["num_experts_per_tok"]
    out = _swiglu(_part(w, "shared_experts"), x)
    scores = _sigmoid(x @ w["gate"].T)
    for t, (token, score) in enumerate(zip(x, scores, strict=True)):
        grouped = (score + w["gate.expert_bias"]).reshape(groups, -1)
        best = np.argsort(-np.sort(grouped)[:, -2:].sum(1))[: config["topk_group"]]
        open_to = np.full_like(grouped, -np.inf)
        open_to[best] = grouped[best]
        chosen = np.argsort(-open_to.reshape(-1))[:top_k]
        weights = score[chosen] / score[chosen].sum() * config["routed_scaling_factor"]
        for e, weight in zip(chosen, weights, strict=True):
            out[t] += weight * _swiglu(_part(w, f"experts.{e}"), token)
    return out
