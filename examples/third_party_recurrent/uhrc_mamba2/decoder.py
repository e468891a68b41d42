"""What the model families share: Mamba-2 layers, with grouped-query attention in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax

from uhrc_engine.models import blocks
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.gqa import gqa_attend
from uhrc_engine.models.hybrid import HybridDecoder, Step, read_recurrent
from uhrc_engine.models.linear_attention import split
from uhrc_engine.models.rope import rotate
from uhrc_full.layout import GQAShape
from uhrc_mamba2.backend import MAMBA2, Mamba2Params
from uhrc_mamba2.layer import Mamba2


class Mamba2Decoder(HybridDecoder):
    """A decoder of layers `mamba` and `self_attn`; a subclass has the feed-forward.

    Queries and keys are rotated where `_cos_sin` gives angles.
    """

    def __init__(self, config: Mapping[str, Any], attention_scale: float | None = None) -> None:
        """attention_scale: what scores are multiplied by; None for head_dim ** -0.5.

        Raises UnsupportedModelError for another activation, or for bounds on the time step.
        """
        blocks.require(config, "hidden_act", "silu")
        recurrent = read_recurrent(config, MAMBA2)
        self.heads: int = config["num_attention_heads"]
        head_dim: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.shape = GQAShape(config.get("num_key_value_heads") or self.heads, head_dim)
        super().__init__(config, MAMBA2, recurrent, self.shape)
        self.mamba = Mamba2.from_config(config, cast("Mamba2Params", recurrent.params))
        self.attention_scale = head_dim**-0.5 if attention_scale is None else attention_scale

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        if self.is_recurrent(index):
            return self.mamba.take(tensors, f"{prefix}.mamba", dtype)
        prefix = f"{prefix}.self_attn"
        names = tuple(f"{prefix}.{name}_proj" for name in "qkv")
        shapes = tuple((size, self.hidden) for size in self._qkv_sizes)
        out = (f"{prefix}.o_proj",)
        return {
            "qkv": blocks.take_linear(tensors, names, shapes, dtype),
            "out": blocks.take_linear(tensors, out, ((self.hidden, self._qkv_sizes[0]),), dtype),
        }

    @property
    def _qkv_sizes(self) -> tuple[int, int, int]:
        q, kv = (n * self.shape.head_dim for n in (self.heads, self.shape.kv_heads))
        return (q, kv, kv)

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        if self.is_recurrent(index):
            return self.mamba.attend(mixer, x, cache, step.inputs)
        parts = split(blocks.linear(x, mixer["qkv"]), self._qkv_sizes)
        q, k, v = (part.reshape(*x.shape[:2], -1, self.shape.head_dim) for part in parts)
        if step.cos_sin is not None:
            q, k = rotate(q, step.cos_sin), rotate(k, step.cos_sin)
        attended, cache = gqa_attend((q, k, v), cache, step.inputs, self.attention_scale)
        return blocks.linear(attended, mixer["out"]), cache
