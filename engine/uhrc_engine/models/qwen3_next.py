"""Qwen3-Next and the text model of Qwen3.5: Gated DeltaNet, with gated attention in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax

from uhrc_core.registry.hf_config import text_config
from uhrc_engine.models import blocks, moe
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.gdn import GDN
from uhrc_engine.models.gqa import GQA, gqa_attend
from uhrc_engine.models.hybrid import CosSin, HybridDecoder, ModuleNames, Step, read_recurrent
from uhrc_engine.models.linear_attention import split
from uhrc_engine.models.rope import rope_from_config, rotate
from uhrc_recurrent.backends import GDN as BACKEND
from uhrc_recurrent.backends import GDNParams

ROTATED = 0.25
"""Part of an attention head that is rotated where the config does not say."""


class Qwen3Next(HybridDecoder):
    """Qwen3NextForCausalLM; Qwen3.5 dense and MoE, alone or inside the multimodal model (of which
    only the text part is loaded). Norms store their distance from 1."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        nested = text_config(hf_config)
        tied = hf_config.get("tie_word_embeddings", nested.get("tie_word_embeddings", False))
        config = {**nested, "tie_word_embeddings": tied}
        recurrent = read_recurrent(hf_config, BACKEND)
        self.attention = GQA.from_config(config)
        super().__init__(config, BACKEND, recurrent, self.attention.layer_cache.shape)
        sizes = cast("GDNParams", recurrent.params)
        self.gdn = GDN(
            hidden=self.hidden,
            key_heads=sizes.num_key_heads,
            value_heads=sizes.num_value_heads,
            key_dim=sizes.key_head_dim,
            value_dim=sizes.value_head_dim,
            conv_kernel=sizes.conv_kernel,
            norm_eps=self.norm_eps,
        )
        settings = {**config, **(config.get("rope_parameters") or {})}
        rotated = settings.get("partial_rotary_factor", ROTATED)
        self.rope = rope_from_config(config, int(self.attention.head_dim * rotated))
        self._config = config

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Qwen3Next:
        """Reads config.json. Raises UnsupportedModelError for another activation, or biases."""
        blocks.require(text_config(config), "hidden_act", "silu")
        blocks.require(text_config(config), "attention_bias", False)
        return cls(config)

    def _names(self, tensors: TensorReader) -> ModuleNames:
        """In the multimodal checkpoints, whose vision tower and MTP layers are left unread, the
        language model is one of two."""
        tensors.skip_under("model.visual")
        tensors.skip_under("mtp")
        nested = "model.language_model"
        is_nested = f"{nested}.embed_tokens.weight" in tensors
        return ModuleNames(nested if is_nested else "model")

    def _take_norm(self, tensors: TensorReader, name: str, dtype: Any) -> jax.Array:
        return blocks.take_centered(tensors, name, self.hidden)

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        if self.is_recurrent(index):
            return self.gdn.take(tensors, f"{prefix}.linear_attn", dtype)
        prefix = f"{prefix}.self_attn"
        dim = self.attention.head_dim
        q_size, kv_size = self.attention.heads * dim, self.attention.kv_heads * dim
        names = tuple(f"{prefix}.{name}_proj" for name in "qkv")
        sizes = (2 * q_size, kv_size, kv_size)
        shapes = tuple((size, self.hidden) for size in sizes)
        out = (f"{prefix}.o_proj",)
        return {
            "qkv": blocks.take_linear(tensors, names, shapes, dtype),
            "q_norm": blocks.take_centered(tensors, f"{prefix}.q_norm", dim),
            "k_norm": blocks.take_centered(tensors, f"{prefix}.k_norm", dim),
            "out": blocks.take_linear(tensors, out, ((self.hidden, q_size),), dtype),
        }

    def _has_experts(self, index: int) -> bool:
        config = self._config
        return (
            config.get("num_experts", 0) > 0
            and index not in (config.get("mlp_only_layers") or ())
            and (index + 1) % config.get("decoder_sparse_step", 1) == 0
        )

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        config, mlp = self._config, f"{prefix}.mlp"
        if not self._has_experts(index):
            size = config["intermediate_size"]
            return {"mlp": blocks.take_swiglu(tensors, mlp, self.hidden, size, dtype)}
        count = config["num_experts"]
        dims = (self.hidden, config["moe_intermediate_size"])
        gate = (f"{mlp}.shared_expert_gate",)
        return {
            "router": moe.take_router(tensors, f"{mlp}.gate", (count, self.hidden)),
            "experts": moe.take_experts(tensors, f"{mlp}.experts", count, dims, dtype),
            "mlp": blocks.take_swiglu(
                tensors,
                f"{mlp}.shared_expert",
                self.hidden,
                config["shared_expert_intermediate_size"],
                dtype,
            ),
            "shared_gate": blocks.take_linear(tensors, gate, ((1, self.hidden),), dtype),
        }

    def _cos_sin(self, positions: jax.Array) -> CosSin:
        return self.rope.cos_sin(positions)

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        if self.is_recurrent(index):
            return self.gdn.attend(mixer, x, cache, step.inputs)
        return self._attend(mixer, x, cache, step)

    def _attend(self, layer: Params, x: jax.Array, cache: Any, step: Step) -> tuple[jax.Array, Any]:
        """Attention with normed queries and keys, each value weighed by a sigmoid gate.

        A head's rows of q_proj are its query, then its gate.
        """
        assert step.cos_sin is not None
        heads, kv_heads, dim = (
            self.attention.heads,
            self.attention.kv_heads,
            self.attention.head_dim,
        )
        rows = x.shape[:2]
        sizes = (2 * heads * dim, kv_heads * dim, kv_heads * dim)
        q_gate, k, v = split(blocks.linear(x, layer["qkv"]), sizes)
        q_gate = q_gate.reshape(*rows, heads, 2 * dim)
        q = self._norm(q_gate[..., :dim], layer["q_norm"])
        k = self._norm(k.reshape(*rows, kv_heads, dim), layer["k_norm"])
        v = v.reshape(*rows, kv_heads, dim)
        qkv = (rotate(q, step.cos_sin), rotate(k, step.cos_sin), v)
        attended, cache = gqa_attend(qkv, cache, step.inputs, self.attention.scale)
        gate = jax.nn.sigmoid(q_gate[..., dim:]).reshape(attended.shape)
        return blocks.linear(attended * gate, layer["out"]), cache

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return moe.feed_forward(layer, x, self._route)

    def _route(self, tokens: jax.Array, router: Params) -> tuple[jax.Array, jax.Array]:
        return moe.softmax_top_k(
            tokens,
            router,
            self._config["num_experts_per_tok"],
            renormalize=self._config.get("norm_topk_prob", True),
        )
