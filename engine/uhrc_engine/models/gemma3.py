"""Gemma 3 (2025): five layers with a window to a full one, each kind with a rotation of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from uhrc_core.kinds import ComponentType
from uhrc_core.registry.hf_config import text_config
from uhrc_engine.models import blocks
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.decoder import Decoder, ModuleNames, Step
from uhrc_engine.models.gqa import GQA, layer_windows
from uhrc_engine.models.rope import Rope, rope_from_config

DEFAULTS: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""What the published configs leave out where it is so."""
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
ROOTS = ("model", "model.language_model", "language_model.model")
"""Where the layers are: in the text model, or in the multimodal one as it is written now and as it
was published."""
OTHER_PARTS = (
    "vision_tower",
    "multi_modal_projector",
    "model.vision_tower",
    "model.multi_modal_projector",
)


class Gemma3(Decoder):
    """Gemma3ForCausalLM, or the text part of Gemma3ForConditionalGeneration.

    Norms store their distance from 1, and stand before and after each sublayer.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: the language model's, with nothing left out. Use `from_hf_config`."""
        full = replace(GQA.from_config(config), scale=config["query_pre_attn_scalar"] ** -0.5)
        windows = layer_windows(config)
        self.attention = tuple(replace(full, window_tokens=window) for window in windows)
        super().__init__(config, [layer.layer_cache for layer in self.attention])
        self.intermediate: int = config["intermediate_size"]
        self.ropes = _ropes(config, full.head_dim)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Gemma3:
        """Reads config.json. Raises UnsupportedModelError for what the layers do not do."""
        given = {key: value for key, value in text_config(config).items() if value is not None}
        blocks.require(given, "hidden_activation", "gelu_pytorch_tanh")
        blocks.require(given, "use_bidirectional_attention", False)
        for cap in ("final_logit_softcapping", "attn_logit_softcapping"):
            blocks.require(given, cap, None)
        return cls(DEFAULTS | given)

    def _names(self, tensors: TensorReader) -> ModuleNames:
        for part in OTHER_PARTS:
            tensors.skip_under(part)
        tensors.skip("language_model.lm_head.weight")  # the tied head once more
        there = (root for root in ROOTS if f"{root}.embed_tokens.weight" in tensors)
        return ModuleNames(next(there, ROOTS[0]))

    def _load_layer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        norms = {
            "attention_norm": "input_layernorm",
            "mixed_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "thought_norm": "post_feedforward_layernorm",
        }
        return {
            "mixer": self._load_mixer(tensors, index, prefix, dtype),
            **self._load_feed_forward(tensors, index, prefix, dtype),
            **{
                name: self._take_norm(tensors, f"{prefix}.{stored}", dtype)
                for name, stored in norms.items()
            },
        }

    def _take_norm(self, tensors: TensorReader, name: str, dtype: Any) -> jax.Array:
        return blocks.take_centered(tensors, name, self.hidden)

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        prefix, attention = f"{prefix}.self_attn", self.attention[index]
        norms = {
            name: blocks.take_centered(tensors, f"{prefix}.{name}", attention.head_dim)
            for name in ("q_norm", "k_norm")
        }
        return attention.take(tensors, prefix, dtype) | norms

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        del index
        mlp = f"{prefix}.mlp"
        return {"mlp": blocks.take_swiglu(tensors, mlp, self.hidden, self.intermediate, dtype)}

    def _embed(self, params: Params, token_ids: jax.Array) -> jax.Array:
        """Multiplied by sqrt(hidden), which is rounded to the weights' type first."""
        embedded = super()._embed(params, token_ids)
        return embedded * jnp.asarray(self.hidden**0.5, embedded.dtype)

    def _layer(
        self, index: int, layer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        normed = self._norm(x, layer["attention_norm"])
        mixed, cache = self._mix(index, layer["mixer"], normed, cache, step)
        x = x + self._norm(mixed, layer["mixed_norm"])
        thought = self._feed_forward(layer, self._norm(x, layer["mlp_norm"]))
        return x + self._norm(thought, layer["thought_norm"]), cache

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        attention = self.attention[index]
        cos_sin = self.ropes[attention.component].cos_sin(step.inputs.positions)
        return attention.attend(mixer, x, cache, step.inputs, cos_sin)

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return blocks.swiglu(x, layer["mlp"], _gelu_glu)


def _gelu_glu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


def _ropes(config: Mapping[str, Any], dim: int) -> dict[ComponentType, Rope]:
    """By component; `rope_parameters` by layer type, or as first published: `rope_theta` and
    `rope_scaling` of the full layers, `rope_local_base_freq` of the others."""
    given = config.get("rope_parameters") or {}
    full = {"rope_theta": config.get("rope_theta", GLOBAL_THETA)}
    full |= config.get("rope_scaling") or {}
    local = {"rope_theta": config.get("rope_local_base_freq", LOCAL_THETA)}
    settings = {
        ComponentType.FULL: full | (given.get("full_attention") or {}),
        ComponentType.SWA: local | (given.get("sliding_attention") or {}),
    }
    positions = {"max_position_embeddings": config["max_position_embeddings"]}
    return {
        kind: rope_from_config(positions | {"rope_parameters": own}, dim)
        for kind, own in settings.items()
    }
