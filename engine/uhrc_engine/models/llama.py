"""The Llama family: pre-norm blocks of rotary GQA (or MHA) and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from uhrc_engine.models import blocks
from uhrc_engine.models.contract import (
    Caches,
    LayerCache,
    Model,
    Params,
    StepInputs,
    TensorReader,
)
from uhrc_engine.models.gqa import gqa_attend
from uhrc_engine.models.rope import Rope, rope_from_config, rotate
from uhrc_full.layout import GQAShape


@dataclass(frozen=True, slots=True)
class LlamaDims:
    """The numbers of a Llama config, in elements."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool


class Llama(Model):
    """LlamaForCausalLM, and MistralForCausalLM where it has no sliding window."""

    architectures: ClassVar[tuple[str, ...]] = (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "llama",
        "mistral",
    )

    def __init__(self, dims: LlamaDims, rope: Rope, sizes: tuple[int, int, int]) -> None:
        """sizes: (layers, vocab, max context)."""
        self.dims, self.rope = dims, rope
        num_layers, self.vocab_size, self.max_context_len = sizes
        shape = GQAShape(dims.kv_heads, dims.head_dim)
        self.layer_caches = (LayerCache("full", shape),) * num_layers

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Llama:
        """Reads config.json. Raises UnsupportedModelError for a window or another activation."""
        blocks.require(config, "hidden_act", "silu")
        blocks.require(config, "sliding_window", None)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        dims = LlamaDims(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            norm_eps=config["rms_norm_eps"],
            tied=config.get("tie_word_embeddings", False),
        )
        sizes = (
            config["num_hidden_layers"],
            config["vocab_size"],
            config["max_position_embeddings"],
        )
        return cls(dims, rope_from_config(config, head_dim), sizes)

    def load_params(self, tensors: TensorReader, dtype: Any) -> Params:
        """{"embed", "head", "norm", "layers": one dict per layer}."""
        dims = self.dims
        params: Params = blocks.take_embeddings(
            tensors, (self.vocab_size, dims.hidden), dims.tied, dtype
        )
        params["layers"] = tuple(
            self._load_layer(tensors, f"model.layers.{i}", dtype)
            for i in range(len(self.layer_caches))
        )
        params["norm"] = blocks.take_vector(tensors, "model.norm", dims.hidden, dtype)
        return params

    def _load_layer(self, tensors: TensorReader, prefix: str, dtype: Any) -> Params:
        dims = self.dims
        q_dim, kv_dim = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
        qkv = tuple(f"{prefix}.self_attn.{name}_proj" for name in "qkv")
        qkv_shapes = tuple((out, dims.hidden) for out in (q_dim, kv_dim, kv_dim))
        out = (f"{prefix}.self_attn.o_proj",)
        return {
            "attention_norm": blocks.take_vector(
                tensors, f"{prefix}.input_layernorm", dims.hidden, dtype
            ),
            "qkv": blocks.take_linear(tensors, qkv, qkv_shapes, dtype),
            "out": blocks.take_linear(tensors, out, ((dims.hidden, q_dim),), dtype),
            "mlp_norm": blocks.take_vector(
                tensors, f"{prefix}.post_attention_layernorm", dims.hidden, dtype
            ),
            "mlp": blocks.take_swiglu(
                tensors, f"{prefix}.mlp", dims.hidden, dims.intermediate, dtype
            ),
        }

    def forward(
        self, params: Params, caches: Caches, inputs: StepInputs
    ) -> tuple[jax.Array, Caches]:
        """See `Model.forward`."""
        eps = self.dims.norm_eps
        cos_sin = self.rope.cos_sin(inputs.positions)
        x = params["embed"][inputs.token_ids]
        written = []
        for layer, cache in zip(params["layers"], caches["full"], strict=True):
            normed = blocks.rms_norm(x, layer["attention_norm"], eps)
            attended, cache = self._attention(layer, normed, cache, inputs, cos_sin)
            x = x + attended
            x = x + blocks.swiglu(blocks.rms_norm(x, layer["mlp_norm"], eps), layer["mlp"])
            written.append(cache)
        x = blocks.rms_norm(x, params["norm"], eps)
        return blocks.last_token_logits(x, params["head"], inputs), {"full": tuple(written)}

    def _attention(
        self,
        layer: Params,
        x: jax.Array,
        cache: Any,
        inputs: StepInputs,
        cos_sin: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, Any]:
        """x [R, W, hidden] -> (attention output [R, W, hidden], the layer's cache written)."""
        dims = self.dims
        heads = blocks.linear(x, layer["qkv"]).reshape(*x.shape[:2], -1, dims.head_dim)
        q, k, v = (
            heads[:, :, : dims.heads],
            heads[:, :, dims.heads : dims.heads + dims.kv_heads],
            heads[:, :, dims.heads + dims.kv_heads :],
        )
        attended, cache = gqa_attend(
            (rotate(q, cos_sin), rotate(k, cos_sin), v), cache, inputs, dims.head_dim**-0.5
        )
        return blocks.linear(attended, layer["out"]), cache
