"""What the model families share: Mamba-2 layers, with grouped-query attention in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax

from uhrc_engine.models import blocks
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.gqa import GQA
from uhrc_engine.models.hybrid import HybridDecoder, Step, read_recurrent
from uhrc_mamba2.backend import MAMBA2, Mamba2Params
from uhrc_mamba2.layer import Mamba2


class Mamba2Decoder(HybridDecoder):
    """A decoder of layers `mamba` and `self_attn`; a subclass has the feed-forward.

    Queries and keys are rotated where `_cos_sin` gives angles.
    """

    def __init__(self, config: Mapping[str, Any], attention: GQA) -> None:
        """attention: of the layers between.

        Raises UnsupportedModelError for another activation, or for bounds on the time step.
        """
        blocks.require(config, "hidden_act", "silu")
        recurrent = read_recurrent(config, MAMBA2)
        super().__init__(config, MAMBA2, recurrent, attention.layer_cache.shape)
        self.attention = attention
        self.mamba = Mamba2.from_config(config, cast("Mamba2Params", recurrent.params))

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        if self.is_recurrent(index):
            return self.mamba.take(tensors, f"{prefix}.mamba", dtype)
        return self.attention.take(tensors, f"{prefix}.self_attn", dtype)

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        if self.is_recurrent(index):
            return self.mamba.attend(mixer, x, cache, step.inputs)
        return self.attention.attend(mixer, x, cache, step.inputs, step.cos_sin)
