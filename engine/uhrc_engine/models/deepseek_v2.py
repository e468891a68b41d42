"""DeepSeek-V2 and V2-Lite: multi-head latent attention; experts after the first dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_engine.models import blocks, moe
from uhrc_engine.models.contract import (
    Caches,
    LayerCache,
    Model,
    Params,
    StepInputs,
    TensorReader,
)
from uhrc_engine.models.rope import Rope, rope_from_config, rotate
from uhrc_full.kernels.mla import mla_attention
from uhrc_full.layout import MLAShape


@dataclass(frozen=True, slots=True)
class MLADims:
    """The attention's numbers, in elements; q_rank None = one query projection."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class MoEDims:
    """The feed-forward's numbers; the first `dense_layers` layers have no experts."""

    dense_layers: int
    dense_intermediate: int
    intermediate: int
    experts: int
    shared: int
    top_k: int
    scale: float


class DeepseekV2(Model):
    """DeepseekV2ForCausalLM with greedy top-k routing."""

    architectures: ClassVar[tuple[str, ...]] = ("DeepseekV2ForCausalLM", "deepseek_v2")

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        self.hidden: int = config["hidden_size"]
        self.norm_eps: float = config["rms_norm_eps"]
        self.tied: bool = config.get("tie_word_embeddings", False)
        self.vocab_size = config["vocab_size"]
        self.max_context_len = config["max_position_embeddings"]
        self.attention = MLADims(
            heads=config["num_attention_heads"],
            q_rank=config["q_lora_rank"],
            kv_rank=config["kv_lora_rank"],
            nope=config["qk_nope_head_dim"],
            rope=config["qk_rope_head_dim"],
            value=config["v_head_dim"],
        )
        self.moe = MoEDims(
            dense_layers=config["first_k_dense_replace"],
            dense_intermediate=config["intermediate_size"],
            intermediate=config["moe_intermediate_size"],
            experts=config["n_routed_experts"],
            shared=config["n_shared_experts"],
            top_k=config["num_experts_per_tok"],
            scale=config.get("routed_scaling_factor", 1.0),
        )
        self.rope: Rope = rope_from_config(config, self.attention.rope)
        self.score_scale = (
            self.attention.nope + self.attention.rope
        ) ** -0.5 * self.rope.score_scale
        shape = MLAShape(self.attention.kv_rank, self.attention.rope)
        self.layer_caches = (LayerCache("full", shape),) * config["num_hidden_layers"]

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> DeepseekV2:
        """Reads config.json. Raises UnsupportedModelError for routing we do not have."""
        blocks.require(config, "hidden_act", "silu")
        blocks.require(config, "topk_method", "greedy")
        blocks.require(config, "norm_topk_prob", False)
        blocks.require(config, "scoring_func", "softmax")
        blocks.require(config, "moe_layer_freq", 1)
        return cls(config)

    def load_params(self, tensors: TensorReader, dtype: Any) -> Params:
        """{"embed", "head", "norm", "layers": one dict per layer}."""
        params: Params = blocks.take_embeddings(
            tensors, self.vocab_size, self.hidden, self.tied, dtype
        )
        params["layers"] = tuple(
            self._load_layer(tensors, i, dtype) for i in range(len(self.layer_caches))
        )
        params["norm"] = blocks.take_vector(tensors, "model.norm", self.hidden, dtype)
        return params

    def _load_layer(self, tensors: TensorReader, index: int, dtype: Any) -> Params:
        prefix, ffn, hidden = f"model.layers.{index}", self.moe, self.hidden
        layer: Params = {
            "attention_norm": blocks.take_vector(
                tensors, f"{prefix}.input_layernorm", hidden, dtype
            ),
            "attention": self._load_attention(tensors, f"{prefix}.self_attn", dtype),
            "mlp_norm": blocks.take_vector(
                tensors, f"{prefix}.post_attention_layernorm", hidden, dtype
            ),
        }
        mlp = f"{prefix}.mlp"
        if index < ffn.dense_layers:
            layer["mlp"] = blocks.take_swiglu(tensors, mlp, hidden, ffn.dense_intermediate, dtype)
            return layer
        router = tensors.take(f"{mlp}.gate.weight", (ffn.experts, hidden))
        layer["router"] = blocks.to_device(router.T, jnp.float32)
        layer["experts"] = moe.take_experts(
            tensors, f"{mlp}.experts", ffn.experts, (hidden, ffn.intermediate), dtype
        )
        layer["mlp"] = blocks.take_swiglu(
            tensors, f"{mlp}.shared_experts", hidden, ffn.shared * ffn.intermediate, dtype
        )
        return layer

    def _load_attention(self, tensors: TensorReader, prefix: str, dtype: Any) -> Params:
        """The projections with kv_b_proj cut into its key and value halves per head.

        The rotary rows of the query and key projections are reordered from DeepSeek's interleaved
        pairs (2i, 2i + 1) to (i, i + dim / 2): scores do not change, and `rotate` is everyone's.
        """
        dims, hidden = self.attention, self.hidden
        half_split = np.arange(dims.rope).reshape(-1, 2).T.reshape(-1)
        key_order = np.r_[: dims.kv_rank, dims.kv_rank + half_split]
        query_order = np.r_[: dims.nope, dims.nope + half_split]
        query_dim = dims.nope + dims.rope
        params: Params = {}

        query_name, query_in = f"{prefix}.q_proj", hidden
        if dims.q_rank is not None:
            params["q_a"] = blocks.take_linear(
                tensors, (f"{prefix}.q_a_proj",), ((dims.q_rank, hidden),), dtype
            )
            params["q_a_norm"] = blocks.take_vector(
                tensors, f"{prefix}.q_a_layernorm", dims.q_rank, dtype
            )
            query_name, query_in = f"{prefix}.q_b_proj", dims.q_rank
        query = tensors.take(f"{query_name}.weight", (dims.heads * query_dim, query_in))
        query = query.reshape(dims.heads, query_dim, query_in)[:, query_order]
        params["q"] = {"weight": blocks.to_device(query.reshape(-1, query_in).T, dtype)}

        kv_a = blocks.take_linear(
            tensors,
            (f"{prefix}.kv_a_proj_with_mqa",),
            ((dims.kv_rank + dims.rope, hidden),),
            dtype,
        )
        params["kv_a"] = {name: value[..., key_order] for name, value in kv_a.items()}
        params["kv_a_norm"] = blocks.take_vector(
            tensors, f"{prefix}.kv_a_layernorm", dims.kv_rank, dtype
        )
        kv_b = tensors.take(
            f"{prefix}.kv_b_proj.weight", (dims.heads * (dims.nope + dims.value), dims.kv_rank)
        ).reshape(dims.heads, dims.nope + dims.value, dims.kv_rank)
        params["key_up"] = blocks.to_device(kv_b[:, : dims.nope], dtype)
        params["value_up"] = blocks.to_device(kv_b[:, dims.nope :], dtype)
        params["out"] = blocks.take_linear(
            tensors, (f"{prefix}.o_proj",), ((hidden, dims.heads * dims.value),), dtype
        )
        return params

    def forward(
        self, params: Params, caches: Caches, inputs: StepInputs
    ) -> tuple[jax.Array, Caches]:
        """See `Model.forward`."""
        cos_sin = self.rope.cos_sin(inputs.positions)
        x = params["embed"][inputs.token_ids]
        written = []
        for layer, cache in zip(params["layers"], caches["full"], strict=True):
            normed = blocks.rms_norm(x, layer["attention_norm"], self.norm_eps)
            attended, cache = self._attend(layer["attention"], normed, cache, inputs, cos_sin)
            x = x + attended
            x = x + self._feed_forward(layer, blocks.rms_norm(x, layer["mlp_norm"], self.norm_eps))
            written.append(cache)
        x = blocks.rms_norm(x, params["norm"], self.norm_eps)
        return blocks.last_token_logits(x, params["head"], inputs), {"full": tuple(written)}

    def _attend(
        self,
        layer: Params,
        x: jax.Array,
        cache: Any,
        inputs: StepInputs,
        cos_sin: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, Any]:
        """x [R, W, hidden] -> (attention output [R, W, hidden], the layer's cache written)."""
        dims, rows = self.attention, x.shape[:2]
        query = x
        if "q_a" in layer:
            query = blocks.rms_norm(blocks.linear(x, layer["q_a"]), layer["q_a_norm"], 1e-6)
        query = blocks.linear(query, layer["q"]).reshape(*rows, dims.heads, -1)
        q_nope, q_rope = query[..., : dims.nope], rotate(query[..., dims.nope :], cos_sin)

        latent = blocks.linear(x, layer["kv_a"])
        compressed = blocks.rms_norm(latent[..., : dims.kv_rank], layer["kv_a_norm"], 1e-6)
        k_rope = rotate(latent[..., None, dims.kv_rank :], cos_sin)[..., 0, :]
        latent = jnp.concatenate([compressed, k_rope], axis=-1)
        cache = cache.write(latent.reshape(-1, latent.shape[-1]), inputs.write_indices.reshape(-1))

        absorbed = jnp.einsum("rwhn,hnk->rwhk", q_nope, layer["key_up"])
        attended = mla_attention(
            jnp.concatenate([absorbed, q_rope], axis=-1),
            cache,
            inputs.page_table,
            inputs.kv_lens,
            inputs.q_lens,
            scale=self.score_scale,
        )
        values = jnp.einsum("rwhk,hvk->rwhv", attended, layer["value_up"])
        return blocks.linear(values.reshape(*rows, -1), layer["out"]), cache

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        """The dense feed-forward, or the shared experts plus the routed ones."""
        out = blocks.swiglu(x, layer["mlp"])
        if "router" not in layer:
            return out
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = moe.softmax_top_k(tokens, layer["router"], self.moe.top_k)
        routed = moe.experts(tokens, weights * self.moe.scale, chosen, layer["experts"])
        return out + routed.reshape(x.shape)
