"""A decoder: token embedding, layers that mix tokens and then think about each, a head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from uhrc_core.kinds import ComponentType
from uhrc_engine.models import blocks
from uhrc_engine.models.contract import (
    Caches,
    LayerCache,
    Model,
    Params,
    StepInputs,
    TensorReader,
)
from uhrc_engine.models.rope import CosSin


class Step(NamedTuple):
    """What all layers of a step see."""

    inputs: StepInputs
    cos_sin: CosSin | None
    """Of the new tokens' positions; None for a model that rotates nothing."""


class ModuleNames(NamedTuple):
    """What a checkpoint calls the module that holds the layers, and two modules in it."""

    root: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    """The one after the last layer."""


class Decoder(Model):
    """Token embedding, layers in pre-norm residual form, a last norm and a head.

    A subclass says how it reads a layer's weights and how a layer mixes tokens; `_layer` where its
    residuals are others.
    """

    def __init__(self, config: Mapping[str, Any], layer_caches: Sequence[LayerCache]) -> None:
        """config: the language model's. layer_caches: one per layer."""
        self.hidden: int = config["hidden_size"]
        self.norm_eps: float = config["rms_norm_eps"]
        self.tied: bool = config.get("tie_word_embeddings", False)
        self.vocab_size = config["vocab_size"]
        self.max_context_len = max_context_len(config)
        self.layer_caches = tuple(layer_caches)

    def load_params(self, tensors: TensorReader, dtype: Any) -> Params:
        """{"embed", "head", "norm", "layers": one dict per layer}."""
        names = self._names(tensors)
        shape = (self.vocab_size, self.hidden)
        params: Params = blocks.take_embeddings(
            tensors, shape, self.tied, dtype, name=f"{names.root}.{names.embedding}"
        )
        params["layers"] = tuple(
            self._load_layer(tensors, i, f"{names.root}.layers.{i}", dtype)
            for i in range(len(self.layer_caches))
        )
        params["norm"] = self._take_norm(tensors, f"{names.root}.{names.norm}", dtype)
        return params

    def _names(self, tensors: TensorReader) -> ModuleNames:
        """How the checkpoint names its modules; declares what it has beside them."""
        del tensors
        return ModuleNames()

    def _load_layer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        """{"attention_norm", "mixer", "mlp_norm"} and what `_feed_forward` wants."""
        return {
            "attention_norm": self._take_norm(tensors, f"{prefix}.input_layernorm", dtype),
            "mixer": self._load_mixer(tensors, index, prefix, dtype),
            "mlp_norm": self._take_norm(tensors, f"{prefix}.post_attention_layernorm", dtype),
            **self._load_feed_forward(tensors, index, prefix, dtype),
        }

    def _take_norm(self, tensors: TensorReader, name: str, dtype: Any) -> jax.Array:
        return blocks.take_vector(tensors, name, self.hidden, dtype)

    @abstractmethod
    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        """The weights of layer `index` (under `prefix`) that mix tokens."""

    @abstractmethod
    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        """The weights of its feed-forward, as `_feed_forward` wants them."""

    def forward(
        self, params: Params, caches: Caches, inputs: StepInputs
    ) -> tuple[jax.Array, Caches]:
        """See `Model.forward`."""
        step = Step(inputs, self._cos_sin(inputs.positions))
        unread = {kind: iter(layers) for kind, layers in caches.items()}
        written: dict[ComponentType, list[Any]] = {kind: [] for kind in caches}
        x = self._embed(params, inputs.token_ids)
        for index, layer in enumerate(params["layers"]):
            kind = self.layer_caches[index].component
            x, cache = self._layer(index, layer, x, next(unread[kind]), step)
            written[kind].append(cache)
        x = self._norm(x, params["norm"])
        logits = blocks.last_token_logits(x, params["head"], inputs)
        return logits, {kind: tuple(layers) for kind, layers in written.items()}

    def _embed(self, params: Params, token_ids: jax.Array) -> jax.Array:
        """int32[R, W] token ids -> [R, W, hidden]."""
        return params["embed"][token_ids]

    def _cos_sin(self, positions: jax.Array) -> CosSin | None:
        """Angles for int32[R, W] positions; None where nothing is rotated."""
        del positions
        return None

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return blocks.rms_norm(x, weight, self.norm_eps)

    def _layer(
        self, index: int, layer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        """x [R, W, hidden] through one layer, and its cache written."""
        mixed, cache = self._mix(
            index, layer["mixer"], self._norm(x, layer["attention_norm"]), cache, step
        )
        x = x + mixed
        return x + self._feed_forward(layer, self._norm(x, layer["mlp_norm"])), cache

    @abstractmethod
    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        """Attention or recurrence over x [R, W, hidden], and the layer's cache written."""

    @abstractmethod
    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        """The dense feed-forward or the experts over x [R, W, hidden]."""


def max_context_len(config: Mapping[str, Any]) -> int:
    """Positions the model was made for, under either of the names in use."""
    return config.get("max_position_embeddings") or config["model_max_length"]
