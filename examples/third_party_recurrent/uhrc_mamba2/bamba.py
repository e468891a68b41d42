"""Bamba: Mamba-2 and partly rotated GQA, each with SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from uhrc_engine.models import blocks
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.gqa import GQA
from uhrc_engine.models.hybrid import CosSin, ModuleNames
from uhrc_engine.models.rope import rope_from_config
from uhrc_mamba2.decoder import Mamba2Decoder

ROTATED = 0.5
"""Part of an attention head that is rotated where the config does not say."""


class Bamba(Mamba2Decoder):
    """BambaForCausalLM."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        super().__init__(config, GQA.from_config(config))
        self.intermediate: int = config["intermediate_size"]
        settings = config.get("rope_parameters") or {}
        rotated = settings.get("partial_rotary_factor", ROTATED)
        self.rope = rope_from_config(config, int(self.attention.head_dim * rotated))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Bamba:
        """Reads config.json. Raises UnsupportedModelError for what the layers do not do."""
        return cls(config)

    def _names(self, tensors: TensorReader) -> ModuleNames:
        del tensors
        return ModuleNames(norm="final_layernorm")

    def _load_layer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        return {
            "attention_norm": self._take_norm(tensors, f"{prefix}.input_layernorm", dtype),
            "mixer": self._load_mixer(tensors, index, prefix, dtype),
            "mlp_norm": self._take_norm(tensors, f"{prefix}.pre_ff_layernorm", dtype),
            **self._load_feed_forward(tensors, index, prefix, dtype),
        }

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        mlp, size = f"{prefix}.feed_forward", self.intermediate
        return {"mlp": blocks.take_swiglu(tensors, mlp, self.hidden, size, dtype)}

    def _cos_sin(self, positions: jax.Array) -> CosSin:
        return self.rope.cos_sin(positions)

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return blocks.swiglu(x, layer["mlp"])
