"""DeepSeek-V2 and V2-Lite: multi-head latent attention; experts after the first dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from uhrc_engine.models import blocks, moe
from uhrc_engine.models.contract import (
    Caches,
    LayerCache,
    Model,
    Params,
    StepInputs,
    TensorReader,
)
from uhrc_engine.models.mla import MLA
from uhrc_engine.models.rope import Rope, rope_from_config


@dataclass(frozen=True, slots=True)
class MoEDims:
    """The feed-forward's numbers; the first `dense_layers` layers have no experts."""

    dense_layers: int
    dense_intermediate: int
    intermediate: int
    experts: int
    shared: int
    top_k: int
    scale: float


class DeepseekV2(Model):
    """DeepseekV2ForCausalLM with greedy top-k routing."""

    architectures: ClassVar[tuple[str, ...]] = ("DeepseekV2ForCausalLM", "deepseek_v2")

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        self.hidden: int = config["hidden_size"]
        self.norm_eps: float = config["rms_norm_eps"]
        self.tied: bool = config.get("tie_word_embeddings", False)
        self.vocab_size = config["vocab_size"]
        self.max_context_len = config["max_position_embeddings"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.rope: Rope = rope_from_config(config, rope)
        self.attention = MLA(
            hidden=self.hidden,
            heads=config["num_attention_heads"],
            q_rank=config["q_lora_rank"],
            kv_rank=config["kv_lora_rank"],
            nope=nope,
            rope=rope,
            value=config["v_head_dim"],
            scale=(nope + rope) ** -0.5 * self.rope.score_scale,
        )
        self.moe = MoEDims(
            dense_layers=config["first_k_dense_replace"],
            dense_intermediate=config["intermediate_size"],
            intermediate=config["moe_intermediate_size"],
            experts=config["n_routed_experts"],
            shared=config["n_shared_experts"],
            top_k=config["num_experts_per_tok"],
            scale=config.get("routed_scaling_factor", 1.0),
        )
        self.layer_caches = (LayerCache("full", self.attention.cache_shape),) * config[
            "num_hidden_layers"
        ]

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> DeepseekV2:
        """Reads config.json. Raises UnsupportedModelError for routing we do not have."""
        blocks.require(config, "hidden_act", "silu")
        blocks.require(config, "topk_method", "greedy")
        blocks.require(config, "norm_topk_prob", False)
        blocks.require(config, "scoring_func", "softmax")
        blocks.require(config, "moe_layer_freq", 1)
        return cls(config)

    def load_params(self, tensors: TensorReader, dtype: Any) -> Params:
        """{"embed", "head", "norm", "layers": one dict per layer}."""
        params: Params = blocks.take_embeddings(
            tensors, (self.vocab_size, self.hidden), self.tied, dtype
        )
        params["layers"] = tuple(
            self._load_layer(tensors, i, dtype) for i in range(len(self.layer_caches))
        )
        params["norm"] = blocks.take_vector(tensors, "model.norm", self.hidden, dtype)
        return params

    def _load_layer(self, tensors: TensorReader, index: int, dtype: Any) -> Params:
        prefix, ffn, hidden = f"model.layers.{index}", self.moe, self.hidden
        layer: Params = {
            "attention_norm": blocks.take_vector(
                tensors, f"{prefix}.input_layernorm", hidden, dtype
            ),
            "attention": self.attention.take(tensors, f"{prefix}.self_attn", dtype),
            "mlp_norm": blocks.take_vector(
                tensors, f"{prefix}.post_attention_layernorm", hidden, dtype
            ),
        }
        mlp = f"{prefix}.mlp"
        if index < ffn.dense_layers:
            layer["mlp"] = blocks.take_swiglu(tensors, mlp, hidden, ffn.dense_intermediate, dtype)
            return layer
        layer["router"] = moe.take_router(tensors, f"{mlp}.gate", (ffn.experts, hidden))
        layer["experts"] = moe.take_experts(
            tensors, f"{mlp}.experts", ffn.experts, (hidden, ffn.intermediate), dtype
        )
        layer["mlp"] = blocks.take_swiglu(
            tensors, f"{mlp}.shared_experts", hidden, ffn.shared * ffn.intermediate, dtype
        )
        return layer

    def forward(
        self, params: Params, caches: Caches, inputs: StepInputs
    ) -> tuple[jax.Array, Caches]:
        """See `Model.forward`."""
        cos_sin = self.rope.cos_sin(inputs.positions)
        x = params["embed"][inputs.token_ids]
        written = []
        for layer, cache in zip(params["layers"], caches["full"], strict=True):
            normed = blocks.rms_norm(x, layer["attention_norm"], self.norm_eps)
            attended, cache = self.attention.attend(
                layer["attention"], normed, cache, inputs, cos_sin
            )
            x = x + attended
            normed = blocks.rms_norm(x, layer["mlp_norm"], self.norm_eps)
            x = x + moe.feed_forward(layer, normed, self._route)
            written.append(cache)
        x = blocks.rms_norm(x, params["norm"], self.norm_eps)
        return blocks.last_token_logits(x, params["head"], inputs), {"full": tuple(written)}

    def _route(self, tokens: jax.Array, router: Params) -> tuple[jax.Array, jax.Array]:
        weights, chosen = moe.softmax_top_k(tokens, router, self.moe.top_k)
        return weights * self.moe.scale, chosen
