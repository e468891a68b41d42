"""Kimi-Linear: Kimi Delta Attention, with latent attention without rotation in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax

from uhrc_engine.models import blocks, moe
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.hybrid import HybridDecoder, Step, read_recurrent
from uhrc_engine.models.kda import KDA
from uhrc_engine.models.mla import MLA
from uhrc_recurrent.backends import KDA as BACKEND
from uhrc_recurrent.backends import KDAParams


class KimiLinear(HybridDecoder):
    """KimiLinearForCausalLM, with the published config or the one transformers writes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        recurrent = read_recurrent(config, BACKEND)
        self.mla = MLA.from_config(config)
        super().__init__(config, BACKEND, recurrent, self.mla.cache_shape)
        sizes = cast("KDAParams", recurrent.params)
        self.kda = KDA(
            hidden=self.hidden,
            heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            conv_kernel=sizes.conv_kernel,
            norm_eps=self.norm_eps,
            low_rank=True,
        )
        self.moe = moe.DeepSeekFeedForward.from_config(config, dense_layers=1)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> KimiLinear:
        """Reads config.json. Raises UnsupportedModelError for what the layers do not do."""
        blocks.require(config, "hidden_act", "silu")
        blocks.require(config, "attention_bias", False)
        blocks.require(config, "mla_use_nope", True)
        blocks.require(config, "moe_router_activation_func", "sigmoid")
        blocks.require(config, "moe_layer_freq", 1)
        return cls(config)

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        layer = self.kda if self.is_recurrent(index) else self.mla
        return layer.take(tensors, f"{prefix}.self_attn", dtype)

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        return self.moe.take(tensors, index, prefix, dtype)

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        if self.is_recurrent(index):
            return self.kda.attend(mixer, x, cache, step.inputs)
        return self.mla.attend(mixer, x, cache, step.inputs, None)

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return moe.feed_forward(layer, x, self.moe.routing)
