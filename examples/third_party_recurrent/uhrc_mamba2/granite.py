"""GraniteMoeHybrid (Granite 4 H): Mamba-2 and GQA, each with a shared expert and routed ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from uhrc_engine.models import blocks, moe
from uhrc_engine.models.contract import Caches, Params, StepInputs, TensorReader
from uhrc_engine.models.gqa import GQA
from uhrc_engine.models.hybrid import CosSin, Step
from uhrc_engine.models.rope import Rope, rope_from_config
from uhrc_mamba2.decoder import Mamba2Decoder


class GraniteMoeHybrid(Mamba2Decoder):
    """GraniteMoeHybridForCausalLM with Mamba-2 layers; the dense ones have no routed experts.

    Embeddings, residuals, scores and logits are scaled by factors of the config.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        scale = config.get("attention_multiplier", 1.0)
        super().__init__(config, replace(GQA.from_config(config), scale=scale))
        self.shared_intermediate: int = config["shared_intermediate_size"]
        self.intermediate: int = config["intermediate_size"]
        self.experts: int = config["num_local_experts"]
        self.top_k: int = config["num_experts_per_tok"]
        self.embedding_multiplier: float = config.get("embedding_multiplier", 1.0)
        self.residual_multiplier: float = config.get("residual_multiplier", 1.0)
        self.logits_scaling: float = config.get("logits_scaling", 1.0)
        rotates = config.get("position_embedding_type") == "rope"
        self.rope: Rope | None = (
            rope_from_config(config, self.attention.head_dim) if rotates else None
        )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> GraniteMoeHybrid:
        """Reads config.json. Raises UnsupportedModelError for what the layers do not do."""
        blocks.require(config, "position_embedding_type", None, "rope", "nope")
        return cls(config)

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        shared, size = f"{prefix}.shared_mlp", self.shared_intermediate
        layer: Params = {
            "mlp": {
                "gate_up": self._take(
                    tensors, f"{shared}.input_linear", (2 * size, self.hidden), dtype
                ),
                "down": self._take(tensors, f"{shared}.output_linear", (self.hidden, size), dtype),
            }
        }
        if self.experts == 0:
            return layer
        routed = f"{prefix}.block_sparse_moe"
        router = f"{routed}.router.layer"
        return layer | {
            "router": moe.take_router(tensors, router, (self.experts, self.hidden)),
            "experts": self._take_experts(tensors, routed, dtype),
        }

    def _take(self, tensors: TensorReader, name: str, shape: tuple[int, int], dtype: Any) -> Params:
        return blocks.take_linear(tensors, (name,), (shape,), dtype)

    def _take_experts(self, tensors: TensorReader, prefix: str, dtype: Any) -> Params:
        """Stored as [experts, out, in]; gate and up are one."""
        wide = (self.experts, 2 * self.intermediate, self.hidden)
        narrow = (self.experts, self.hidden, self.intermediate)
        gate_up = tensors.take(f"{prefix}.input_linear.weight", wide)
        down = tensors.take(f"{prefix}.output_linear.weight", narrow)
        return {
            "gate_up": blocks.to_device(gate_up.swapaxes(1, 2), dtype),
            "down": blocks.to_device(down.swapaxes(1, 2), dtype),
        }

    def forward(
        self, params: Params, caches: Caches, inputs: StepInputs
    ) -> tuple[jax.Array, Caches]:
        """See `Model.forward`."""
        logits, caches = super().forward(params, caches, inputs)
        return logits / self.logits_scaling, caches

    def _embed(self, params: Params, token_ids: jax.Array) -> jax.Array:
        return super()._embed(params, token_ids) * self.embedding_multiplier

    def _cos_sin(self, positions: jax.Array) -> CosSin | None:
        return self.rope.cos_sin(positions) if self.rope else None

    def _layer(
        self, index: int, layer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        normed = self._norm(x, layer["attention_norm"])
        mixed, cache = self._mix(index, layer["mixer"], normed, cache, step)
        x = x + mixed * self.residual_multiplier
        fed = self._feed_forward(layer, self._norm(x, layer["mlp_norm"]))
        return x + fed * self.residual_multiplier, cache

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return moe.feed_forward(layer, x, self._route)

    def _route(self, tokens: jax.Array, router: Params) -> tuple[jax.Array, jax.Array]:
        """A softmax over the chosen experts' scores alone is one over all, made to sum to 1."""
        return moe.softmax_top_k(tokens, router, self.top_k, renormalize=True)
