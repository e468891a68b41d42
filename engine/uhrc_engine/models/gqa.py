"""Grouped-query attention over the paged pools: of full layers and of layers with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from uhrc_core.kinds import ComponentType
from uhrc_core.registry.hf_config import layer_types_of, window_layers_of
from uhrc_engine.models import blocks
from uhrc_engine.models.contract import LayerCache, Params, StepInputs, TensorReader
from uhrc_engine.models.errors import UnsupportedModelError
from uhrc_engine.models.rope import CosSin, rotate
from uhrc_full.kernels.attention import paged_attention
from uhrc_full.layout import GQAShape

LAYER_TYPES = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class GQA:
    """One layer's numbers, in elements."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """What scores are multiplied by."""
    norm_eps: float
    """Of the norms of queries and keys, in a layer that has them."""
    window_tokens: int | None = None
    """How many tokens a token attends to, itself included; None for all."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GQA:
        """A full layer under the usual names."""
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            norm_eps=config["rms_norm_eps"],
        )

    @property
    def component(self) -> ComponentType:
        """The kind of the pool that holds the layer's keys and values."""
        return component_of(self.window_tokens)

    @property
    def layer_cache(self) -> LayerCache:
        """What the layer keeps of a token, and where."""
        shape = GQAShape(self.kv_heads, self.head_dim)
        return LayerCache(self.component, shape, self.window_tokens)

    def take(self, tensors: TensorReader, prefix: str, dtype: Any) -> Params:
        """{"qkv", "out"} under `prefix` ("….self_attn").

        A model adds "q_norm" and "k_norm" [head_dim] where queries and keys are normed before the
        rotation, and "sinks" [heads] where the softmax has one logit more than there are tokens.
        """
        names = tuple(f"{prefix}.{name}_proj" for name in "qkv")
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = tuple((size, self.hidden) for size in (q_size, kv_size, kv_size))
        out = (f"{prefix}.o_proj",)
        return {
            "qkv": blocks.take_linear(tensors, names, shapes, dtype),
            "out": blocks.take_linear(tensors, out, ((self.hidden, q_size),), dtype),
        }

    def attend(
        self,
        layer: Params,
        x: jax.Array,
        cache: Any,
        inputs: StepInputs,
        cos_sin: CosSin | None,
    ) -> tuple[jax.Array, Any]:
        """x [R, W, hidden] -> (attention output [R, W, hidden], the layer's cache written).

        cos_sin: of the new tokens' positions; None where queries and keys are not rotated.
        """
        heads = blocks.linear(x, layer["qkv"]).reshape(*x.shape[:2], -1, self.head_dim)
        keys = self.heads + self.kv_heads
        q, k, v = heads[:, :, : self.heads], heads[:, :, self.heads : keys], heads[:, :, keys:]
        if "q_norm" in layer:
            q = blocks.rms_norm(q, layer["q_norm"], self.norm_eps)
            k = blocks.rms_norm(k, layer["k_norm"], self.norm_eps)
        if cos_sin is not None:
            q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        softmax = Softmax(self.window_tokens, layer.get("sinks"))
        attended, cache = gqa_attend((q, k, v), cache, inputs, self.scale, softmax)
        return blocks.linear(attended, layer["out"]), cache


class Softmax(NamedTuple):
    """What a token's softmax goes over: the tokens it sees, and a sink."""

    window_tokens: int | None = None
    """How many of the last tokens, itself included; None for all."""
    sinks: jax.Array | None = None
    """[heads] one more logit, which brings no value; None for none."""


EVERY_TOKEN = Softmax()


def gqa_attend(
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    cache: Any,
    inputs: StepInputs,
    scale: float,
    softmax: Softmax = EVERY_TOKEN,
) -> tuple[jax.Array, Any]:
    """Writes the new keys and values, and attends.

    qkv: q [R, W, heads, head_dim], k and v [R, W, kv_heads, head_dim], rotated. cache: the layer's
    `uhrc_full.pool.KVLayer`, of the full pool, or of the swa pool where there is a window. scale:
    what scores are multiplied by. Returns [R, W, heads * head_dim] and the cache written.
    """
    q, k, v = qkv
    window, sinks = softmax
    places, token = inputs.places[component_of(window)], (-1, *k.shape[2:])
    cache = cache.write(k.reshape(token), v.reshape(token), places.write_indices.reshape(-1))
    view = (q, cache, places.page_table, inputs.kv_lens, inputs.q_lens)
    if window is None:
        attended = paged_attention(*view, scale=scale, sinks=sinks)
    else:
        from uhrc_swa.kernels.window_attention import window_attention  # what no other model needs

        attended = window_attention(*view, scale=scale, window_tokens=window, sinks=sinks)
    return attended.reshape(*q.shape[:2], -1), cache


def component_of(window_tokens: int | None) -> ComponentType:
    """The kind of the pool that holds the keys and values of a layer with this window."""
    return ComponentType.FULL if window_tokens is None else ComponentType.SWA


def layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer, how many tokens its window has; None for a full layer.

    Which layers have one is the core's rule, so that the cache's plugins and the model agree.
    Raises UnsupportedModelError for layers of another kind.
    """
    unknown = sorted({*(layer_types_of(config) or ())} - {*LAYER_TYPES})
    if unknown:
        raise UnsupportedModelError(
            f"layer_types: {unknown[0]!r} is not supported; supported: {', '.join(LAYER_TYPES)}"
        )
    count = config["num_hidden_layers"]
    windowed = frozenset(window_layers_of(config, count))
    return tuple(config["sliding_window"] if i in windowed else None for i in range(count))
