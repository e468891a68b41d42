"""MiniMax-Text-01: Lightning attention (arXiv 2401.04658, 2501.08313) and GQA, all with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from uhrc_engine.models import blocks, moe
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.gqa import GQA
from uhrc_engine.models.hybrid import CosSin, HybridDecoder, Step, read_recurrent
from uhrc_engine.models.linear_attention import lightning, split
from uhrc_engine.models.rope import rope_from_config
from uhrc_recurrent.backends import GLA as BACKEND
from uhrc_recurrent.backends import GLAParams
from uhrc_recurrent.kernels.gla import GLATokens, minimax_log_decay

LIGHTNING_NORM_EPS = 1e-6
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Tensors transformers stores although the config determines them."""


class Residual(NamedTuple):
    """What the input of a sublayer and its output are multiplied by when they are added."""

    alpha: float
    beta: float


class MiniMax(HybridDecoder):
    """MiniMaxForCausalLM, and MiniMaxText01ForCausalLM as first published.

    Residuals are taken after the norm: y = norm(x); x = alpha y + beta sublayer(y).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        recurrent = read_recurrent(config, BACKEND)
        sizes = cast("GLAParams", recurrent.params)
        self.heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.attention = GQA.from_config(config)
        super().__init__(config, BACKEND, recurrent, self.attention.layer_cache.shape)
        self.rope = rope_from_config(config, config.get("rotary_dim") or self.head_dim)
        self.intermediate: int = config["intermediate_size"]
        self.experts: int = config["num_local_experts"]
        self.top_k: int = config["num_experts_per_tok"]
        self.residuals = {
            kind: _residual(config, kind) for kind in ("full_attn", "linear_attn", "mlp")
        }

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> MiniMax:
        """Reads config.json. Raises UnsupportedModelError for what the layers do not do."""
        blocks.require(config, "hidden_act", "silu")
        blocks.require(config, "sliding_window", None)
        blocks.require(config, "postnorm", True)
        blocks.require(config, "shared_intermediate_size", 0)
        return cls(config)

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        prefix = f"{prefix}.self_attn"
        if not self.is_recurrent(index):
            return self.attention.take(tensors, prefix, dtype)
        for name in DERIVED:
            tensors.skip(f"{prefix}.{name}")
        width = self.heads * self.head_dim
        names = (f"{prefix}.qkv_proj", f"{prefix}.output_gate")
        shapes = ((3 * width, self.hidden), (width, self.hidden))
        out = (f"{prefix}.out_proj",)
        return {
            "in": blocks.take_linear(tensors, names, shapes, dtype),
            "norm": blocks.take_vector(tensors, f"{prefix}.norm", width, jnp.float32),
            "out": blocks.take_linear(tensors, out, ((self.hidden, width),), dtype),
        }

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        del index
        moe_prefix, dims = f"{prefix}.block_sparse_moe", (self.hidden, self.intermediate)
        return {
            "router": moe.take_router(tensors, f"{moe_prefix}.gate", (self.experts, self.hidden)),
            "experts": moe.take_experts(
                tensors, f"{moe_prefix}.experts", self.experts, dims, dtype
            ),
        }

    def _cos_sin(self, positions: jax.Array) -> CosSin:
        return self.rope.cos_sin(positions)

    def _layer(
        self, index: int, layer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        kind = "linear_attn" if self.is_recurrent(index) else "full_attn"
        x = self._norm(x, layer["attention_norm"])
        mixed, cache = self._mix(index, layer["mixer"], x, cache, step)
        x = self._norm(self._add(kind, x, mixed), layer["mlp_norm"])
        return self._add("mlp", x, self._feed_forward(layer, x)), cache

    def _add(self, kind: str, x: jax.Array, update: jax.Array) -> jax.Array:
        residual = self.residuals[kind]
        return x * residual.alpha + update * residual.beta

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        if self.is_recurrent(index):
            return self._lightning(index, mixer, x, cache, step)
        return self.attention.attend(mixer, x, cache, step.inputs, step.cos_sin)

    def _lightning(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        """A head's rows of qkv_proj are its q, k and v; neither rotated nor scaled."""
        width = self.heads * self.head_dim
        qkv, gate = split(blocks.linear(x, mixer["in"]), (3 * width, width))
        heads = jax.nn.silu(qkv).reshape(*x.shape[:2], self.heads, 3 * self.head_dim)
        tokens = GLATokens(*split(heads, (self.head_dim,) * 3))
        log_decay = minimax_log_decay(self.heads, index, len(self.layer_caches))
        out, cache = lightning(tokens, log_decay, cache, step.inputs)
        out = out.reshape(*x.shape[:2], width)
        out = blocks.rms_norm(out, mixer["norm"], LIGHTNING_NORM_EPS)
        out = out * jax.nn.sigmoid(gate.astype(jnp.float32))
        return blocks.linear(out.astype(x.dtype), mixer["out"]), cache

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return moe.feed_forward(layer, x, self._route)

    def _route(self, tokens: jax.Array, router: Params) -> tuple[jax.Array, jax.Array]:
        return moe.softmax_top_k(tokens, router, self.top_k, renormalize=True)


def _residual(config: Mapping[str, Any], kind: str) -> Residual:
    """Under transformers' names (full_attn_alpha_factor) or as first published
    (layernorm_full_attention_alpha)."""

    def factor(name: str) -> float:
        published = f"layernorm_{kind.replace('attn', 'attention')}_{name}"
        return config.get(f"{kind}_{name}_factor", config.get(published, 1))

    return Residual(factor("alpha"), factor("beta"))
