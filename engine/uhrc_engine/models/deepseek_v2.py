"""DeepSeek-V2 and V2-Lite: multi-head latent attention; experts after the first dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from uhrc_core.kinds import ComponentType
from uhrc_engine.models import blocks, moe
from uhrc_engine.models.contract import LayerCache, Params, TensorReader
from uhrc_engine.models.decoder import Decoder, Step
from uhrc_engine.models.mla import MLA
from uhrc_engine.models.rope import CosSin, Rope, rope_from_config


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


class DeepseekV2(Decoder):
    """DeepseekV2ForCausalLM with greedy top-k routing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        self.rope: Rope = rope_from_config(config, config["qk_rope_head_dim"])
        self.attention = MLA.from_config(config, self.rope.score_scale)
        self.moe = MoEDims(
            dense_layers=config["first_k_dense_replace"],
            dense_intermediate=config["intermediate_size"],
            intermediate=config["moe_intermediate_size"],
            experts=config["n_routed_experts"],
            shared=config["n_shared_experts"],
            top_k=config["num_experts_per_tok"],
            scale=config.get("routed_scaling_factor", 1.0),
        )
        cache = LayerCache(ComponentType.FULL, self.attention.cache_shape)
        super().__init__(config, (cache,) * config["num_hidden_layers"])

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> DeepseekV2:
        """Reads config.json. Raises UnsupportedModelError for routing we do not have."""
        blocks.require(config, "hidden_act", "silu")
        blocks.require(config, "topk_method", "greedy")
        blocks.require(config, "norm_topk_prob", False)
        blocks.require(config, "scoring_func", "softmax")
        blocks.require(config, "moe_layer_freq", 1)
        return cls(config)

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        del index
        return self.attention.take(tensors, f"{prefix}.self_attn", dtype)

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        mlp, ffn, hidden = f"{prefix}.mlp", self.moe, self.hidden
        if index < ffn.dense_layers:
            return {"mlp": blocks.take_swiglu(tensors, mlp, hidden, ffn.dense_intermediate, dtype)}
        return {
            "router": moe.take_router(tensors, f"{mlp}.gate", (ffn.experts, hidden)),
            "experts": moe.take_experts(
                tensors, f"{mlp}.experts", ffn.experts, (hidden, ffn.intermediate), dtype
            ),
            "mlp": blocks.take_swiglu(
                tensors, f"{mlp}.shared_experts", hidden, ffn.shared * ffn.intermediate, dtype
            ),
        }

    def _cos_sin(self, positions: jax.Array) -> CosSin:
        return self.rope.cos_sin(positions)

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        del index
        return self.attention.attend(mixer, x, cache, step.inputs, step.cos_sin)

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return moe.feed_forward(layer, x, self._route)

    def _route(self, tokens: jax.Array, router: Params) -> tuple[jax.Array, jax.Array]:
        weights, chosen = moe.softmax_top_k(tokens, router, self.moe.top_k)
        return weights * self.moe.scale, chosen
