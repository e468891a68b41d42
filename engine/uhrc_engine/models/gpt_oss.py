"""gpt-oss (2025): windows in every other layer, attention sinks, experts with a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_engine.models import blocks, moe
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.decoder import Decoder, Step
from uhrc_engine.models.errors import UnsupportedModelError
from uhrc_engine.models.gqa import GQA, layer_windows
from uhrc_engine.models.mxfp4 import take_mxfp4
from uhrc_engine.models.rope import CosSin, rope_from_config

ROPE_THETA = 150_000.0
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""How positions are rotated where the config does not say."""


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate), with both held back by `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The gate has no lower limit."""
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class GptOss(Decoder):
    """GptOssForCausalLM, with experts in MXFP4 as published or as plain tensors."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        full = GQA.from_config(config)
        windows = layer_windows({"model_type": "gpt_oss"} | dict(config))
        self.attention = tuple(replace(full, window_tokens=window) for window in windows)
        super().__init__(config, [layer.layer_cache for layer in self.attention])
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or YARN
        theta = {"rope_theta": config.get("rope_theta", ROPE_THETA)}
        self.rope = rope_from_config({**config, "rope_parameters": theta | scaling}, full.head_dim)
        self.intermediate: int = config["intermediate_size"]
        self.experts: int = config["num_local_experts"]
        self.top_k: int = config["num_experts_per_tok"]
        self.glu = ClampedSwiGLU(config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0))
        self.is_mxfp4 = bool(config.get("quantization_config"))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> GptOss:
        """Reads config.json. Raises UnsupportedModelError for another activation or quantisation
        than MXFP4."""
        blocks.require(config, "hidden_act", "silu")
        method = (config.get("quantization_config") or {}).get("quant_method", "mxfp4")
        if method != "mxfp4":
            raise UnsupportedModelError(
                f"quantization_config.quant_method = {method!r} is not supported; supported: mxfp4"
            )
        return cls(config)

    def _take_norm(self, tensors: TensorReader, name: str, dtype: Any) -> jax.Array:
        """Norms are in float32, whatever the other weights are in."""
        return super()._take_norm(tensors, name, jnp.float32)

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        prefix, attention = f"{prefix}.self_attn", self.attention[index]
        sinks = tensors.take(f"{prefix}.sinks", (attention.heads,))
        return attention.take(tensors, prefix, dtype) | {"sinks": blocks.to_device(sinks, dtype)}

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        del index
        router, shape = f"{prefix}.mlp.router", (self.experts, self.hidden)
        return {
            "router": {
                "weight": blocks.to_device(tensors.take(f"{router}.weight", shape).T, jnp.float32),
                "bias": blocks.to_device(tensors.take(f"{router}.bias", shape[:1]), jnp.float32),
            },
            "experts": self._take_experts(tensors, f"{prefix}.mlp.experts", dtype),
        }

    def _take_experts(self, tensors: TensorReader, prefix: str, dtype: Any) -> Params:
        """As `moe.experts` wants them; the columns of gate and up come in turn."""
        count, hidden, wide = self.experts, self.hidden, 2 * self.intermediate
        take = partial(take_mxfp4, tensors) if self.is_mxfp4 else tensors.take
        gate_up = take(f"{prefix}.gate_up_proj", (count, hidden, wide))
        gate_up_bias = tensors.take(f"{prefix}.gate_up_proj_bias", (count, wide))
        down = take(f"{prefix}.down_proj", (count, self.intermediate, hidden))
        gate_then_up = np.arange(wide).reshape(-1, 2).T.reshape(-1)
        return {
            "gate_up": blocks.to_device(gate_up[..., gate_then_up], dtype),
            "gate_up_bias": blocks.to_device(gate_up_bias[..., gate_then_up], dtype),
            "down": blocks.to_device(down, dtype),
            "down_bias": blocks.to_device(
                tensors.take(f"{prefix}.down_proj_bias", (count, hidden)), dtype
            ),
        }

    def _cos_sin(self, positions: jax.Array) -> CosSin:
        return self.rope.cos_sin(positions)

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        return self.attention[index].attend(mixer, x, cache, step.inputs, step.cos_sin)

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return moe.feed_forward(layer, x, self._route, self.glu)

    def _route(self, tokens: jax.Array, router: Params) -> tuple[jax.Array, jax.Array]:
        """The softmax over the top k scores alone."""
        scores, chosen = jax.lax.top_k(
            blocks.linear(tokens.astype(jnp.float32), router), self.top_k
        )
        weights = jnp.exp(scores - scores[:, :1])
        return weights / blocks.exact_sum(weights), chosen
