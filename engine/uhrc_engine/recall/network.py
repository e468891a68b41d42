"""A differentiable Kimi-Linear over a dict of weights under their Hugging Face names.

Only what the recall model needs: no cache, dense feed-forward, rows of equal length. The engine
runs the result with its own model (`uhrc_engine.models.kimi_linear`); a test compares this form
with transformers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_engine.recall.task import BOS, EOS, PAD, VOCAB_SIZE

Weights = dict[str, Any]
"""Hugging Face tensor name -> float32 array."""

LATENT_NORM_EPS = 1e-6
L2NORM_EPS = 1e-6
CHUNK = 16
LOG_DECAY_MIN = -5.0
"""Of a token, in this form alone: factors between two tokens stay below exp(5 * CHUNK), which is a
float32. What a stronger decay leaves (0.7 % a token) is not worth more."""

CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "model_max_length": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    # Every feed-forward is dense; the experts' sizes are there because the format has them.
    "first_k_dense_replace": 4,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "num_heads": 2,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
    },
    "torch_dtype": "float32",
}


def init_weights(config: dict[str, Any], seed: int) -> Weights:
    """Random weights: matrices of scale 1/sqrt(fan in), norms 1, decay gates nearly open."""
    rng = np.random.default_rng(seed)
    return {name: _init(rng, name, shape) for name, shape in _shapes(config).items()}


def forward(config: dict[str, Any], weights: Weights, token_ids: jax.Array) -> jax.Array:
    """Logits float32[B, T, vocab] of int32[B, T] tokens."""
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][token_ids]
    for index in range(config["num_hidden_layers"]):
        layer = _Layer(weights, f"model.layers.{index}")
        mix = _kda if index + 1 in config["linear_attn_config"]["kda_layers"] else _mla
        x = x + mix(config, layer, rms_norm(x, layer["input_layernorm.weight"], eps))
        h = rms_norm(x, layer["post_attention_layernorm.weight"], eps)
        h = jax.nn.silu(layer.linear(h, "mlp.gate_proj")) * layer.linear(h, "mlp.up_proj")
        x = x + layer.linear(h, "mlp.down_proj")
    x = rms_norm(x, weights["model.norm.weight"], eps)
    return x @ weights["lm_head.weight"].T


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


class _Layer:
    """A layer's weights by the rest of their names."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def __getitem__(self, name: str) -> jax.Array:
        return self._weights[f"{self._prefix}.{name}"]

    def linear(self, x: jax.Array, name: str) -> jax.Array:
        return x @ self[f"{name}.weight"].T


def _mla(config: dict[str, Any], layer: _Layer, x: jax.Array) -> jax.Array:
    """Latent attention without rotation; x [B, T, hidden]."""
    rank, nope = config["kv_lora_rank"], config["qk_nope_head_dim"]
    heads = (*x.shape[:2], config["num_attention_heads"], -1)
    query = layer.linear(x, "self_attn.q_proj").reshape(heads)
    latent = layer.linear(x, "self_attn.kv_a_proj_with_mqa")
    latent, shared_key = latent[..., :rank], latent[..., rank:]
    latent = rms_norm(latent, layer["self_attn.kv_a_layernorm.weight"], LATENT_NORM_EPS)
    key_value = layer.linear(latent, "self_attn.kv_b_proj").reshape(heads)
    key, value = key_value[..., :nope], key_value[..., nope:]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query[..., :nope], key)
    scores += jnp.einsum("bqhd,bkd->bhqk", query[..., nope:], shared_key)
    scores *= query.shape[-1] ** -0.5
    causal = np.tri(x.shape[1], dtype=bool)
    attention = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bhqk,bkhd->bqhd", attention, value).reshape(*x.shape[:2], -1)
    return layer.linear(out, "self_attn.o_proj")


def _kda(config: dict[str, Any], layer: _Layer, x: jax.Array) -> jax.Array:
    """Kimi Delta Attention with its convolutions and gates; x [B, T, hidden]."""
    linear = config["linear_attn_config"]
    heads = (*x.shape[:2], linear["num_heads"], linear["head_dim"])

    def low_rank(down: str, up: str) -> jax.Array:
        return layer.linear(layer.linear(x, f"self_attn.{down}"), f"self_attn.{up}")

    q, k, v = (
        _short_conv(
            layer.linear(x, f"self_attn.{name}_proj"), layer[f"self_attn.{name}_conv1d.weight"]
        ).reshape(heads)
        for name in "qkv"
    )
    decay = (low_rank("f_a_proj", "f_b_proj") + layer["self_attn.dt_bias"]).reshape(heads)
    log_decay = -jnp.exp(layer["self_attn.A_log"]) * jax.nn.softplus(decay)
    beta = jax.nn.sigmoid(layer.linear(x, "self_attn.b_proj"))[..., None]
    out = delta_rule(_unit(q) * linear["head_dim"] ** -0.5, _unit(k), v, log_decay, beta)
    out = rms_norm(out, layer["self_attn.o_norm.weight"], config["rms_norm_eps"])
    out = out * jax.nn.sigmoid(low_rank("g_a_proj", "g_b_proj")).reshape(heads)
    return layer.linear(out.reshape(*x.shape[:2], -1), "self_attn.o_proj")


def _short_conv(x: jax.Array, weight: jax.Array) -> jax.Array:
    """silu of the causal depthwise convolution; x [B, T, C], weight [C, 1, kernel]."""
    kernel, tokens = weight.shape[-1], x.shape[1]
    padded = jnp.pad(x, [(0, 0), (kernel - 1, 0), (0, 0)])
    taps = (padded[:, i : i + tokens] * weight[:, 0, i] for i in range(kernel))
    return jax.nn.silu(sum(taps, jnp.zeros_like(x)))


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2NORM_EPS)


def delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> jax.Array:
    """The gated delta rule from a zero state; [B, T, H, D] each, beta [B, T, H, 1].

    The formulas are those of `uhrc_recurrent.kernels.delta`, in short chunks whose decays are
    counted from the middle and held above LOG_DECAY_MIN: reverse-mode gradients stay finite.
    """
    tokens = q.shape[1]
    padding = -tokens % CHUNK

    def chunks(x: jax.Array) -> jax.Array:
        """[chunks, B, H, CHUNK, ...]"""
        x = jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)])
        x = x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
        return jnp.transpose(x, (1, 0, 3, 2, 4))

    log_decay = jnp.maximum(log_decay, LOG_DECAY_MIN)
    q, k, v, log_decay, beta = (chunks(x) for x in (q, k, v, log_decay, beta))
    # Sums of decays as a matrix product, which is what a CPU is fast at.
    row, column = np.ogrid[:CHUNK, :CHUNK]
    since = jnp.asarray(column <= row, jnp.float32) @ log_decay
    from_middle = since - since[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    late, early = jnp.exp(from_middle), jnp.swapaxes(k * jnp.exp(-from_middle), -1, -2)
    read_back, scores = (k * beta * late) @ early, (q * late) @ early
    inverse = _unit_lower_inverse(jnp.where(column < row, read_back, 0))
    scores = jnp.where(column <= row, scores, 0)
    decayed = jnp.exp(since)
    until = jnp.exp(since[..., -1:, :] - since)
    pieces = (
        inverse @ (beta * v),
        inverse @ (beta * k * decayed),
        q * decayed,
        scores,
        jnp.swapaxes(k * until, -1, -2),
        jnp.swapaxes(decayed[..., -1:, :], -1, -2),
    )

    def walk(state: jax.Array, piece: Any) -> tuple[jax.Array, jax.Array]:
        wanted, known, query, score, key, kept = piece
        writes = wanted - known @ state
        return state * kept + key @ writes, query @ state + score @ writes

    state = jnp.zeros((*q.shape[1:3], q.shape[-1], v.shape[-1]))
    _, out = jax.lax.scan(walk, state, pieces)
    out = jnp.transpose(out, (1, 0, 3, 2, 4))
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :tokens]


def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 for strictly lower triangular [..., 16, 16], by powers: exact after four."""
    eye = jnp.eye(CHUNK)
    power, inverse = -lower, eye - lower
    for _ in range(3):
        power = power @ power
        inverse = inverse @ (eye + power)
    return inverse


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for index in range(config["num_hidden_layers"]):
        is_kda = index + 1 in config["linear_attn_config"]["kda_layers"]
        mixer = _kda_shapes(config) if is_kda else _mla_shapes(config)
        layer = {f"self_attn.{name}": shape for name, shape in mixer.items()} | {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _kda_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    channels, kernel = heads * dim, linear["short_conv_kernel_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "A_log": (1, 1, heads, 1),
        "dt_bias": (channels,),
        "b_proj.weight": (heads, hidden),
        "o_norm.weight": (dim,),
        "o_proj.weight": (hidden, channels),
    }
    for name in "qkv":
        shapes[f"{name}_proj.weight"] = (channels, hidden)
        shapes[f"{name}_conv1d.weight"] = (channels, 1, kernel)
    for gate in "fg":
        shapes[f"{gate}_a_proj.weight"] = (dim, hidden)
        shapes[f"{gate}_b_proj.weight"] = (channels, dim)
    return shapes


def _mla_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = (
        config[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return {
        "q_proj.weight": (heads * (nope + rope), hidden),
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }


def _init(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "norm" in name:
        return np.ones(shape, np.float32)
    if name.endswith("A_log"):
        return np.zeros(shape, np.float32)
    if name.endswith("dt_bias"):
        decay = np.exp(rng.uniform(np.log(1e-4), np.log(1e-1), shape))
        return np.log(np.expm1(decay)).astype(np.float32)  # softplus gives the decay back
    scale = 0.5 if "embed" in name else shape[-1] ** -0.5
    return (rng.standard_normal(shape) * scale).astype(np.float32)
