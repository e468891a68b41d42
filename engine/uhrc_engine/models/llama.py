"""The Llama family: pre-norm blocks of rotary GQA (or MHA) and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from uhrc_engine.models import blocks
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.decoder import Decoder, Step
from uhrc_engine.models.gqa import GQA, layer_windows
from uhrc_engine.models.rope import CosSin, rope_from_config


class Llama(Decoder):
    """LlamaForCausalLM: every layer is full."""

    def __init__(self, config: Mapping[str, Any], windows: Sequence[int | None]) -> None:
        """windows: each layer's, as `layer_windows`. Use `from_hf_config`."""
        full = GQA.from_config(config)
        self.attention = tuple(replace(full, window_tokens=window) for window in windows)
        super().__init__(config, [layer.layer_cache for layer in self.attention])
        self.intermediate: int = config["intermediate_size"]
        self.rope = rope_from_config(config, full.head_dim)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Llama:
        """Reads config.json. Raises UnsupportedModelError for a window or another activation."""
        blocks.require(config, "hidden_act", "silu")
        blocks.require(config, "sliding_window", None)
        return cls(config, (None,) * config["num_hidden_layers"])

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        return self.attention[index].take(tensors, f"{prefix}.self_attn", dtype)

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        del index
        mlp = f"{prefix}.mlp"
        return {"mlp": blocks.take_swiglu(tensors, mlp, self.hidden, self.intermediate, dtype)}

    def _cos_sin(self, positions: jax.Array) -> CosSin:
        return self.rope.cos_sin(positions)

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        return self.attention[index].attend(mixer, x, cache, step.inputs, step.cos_sin)

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return blocks.swiglu(x, layer["mlp"])


class Mistral(Llama):
    """MistralForCausalLM: every layer has the window, if the config has one."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Mistral:
        """Reads config.json. Raises UnsupportedModelError for another activation."""
        blocks.require(config, "hidden_act", "silu")
        return cls(config, layer_windows(config))


class Qwen2(Llama):
    """Qwen2ForCausalLM: biases on q, k and v; the later layers may have a window."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Qwen2:
        """Reads config.json. Raises UnsupportedModelError for another activation."""
        blocks.require(config, "hidden_act", "silu")
        return cls(config, layer_windows(config))


class Qwen3(Qwen2):
    """Qwen3ForCausalLM: queries and keys are normed, and nothing has a bias."""

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        mixer = super()._load_mixer(tensors, index, prefix, dtype)
        for name in ("q_norm", "k_norm"):
            mixer[name] = blocks.take_vector(
                tensors, f"{prefix}.self_attn.{name}", self.attention[index].head_dim, dtype
            )
        return mixer
