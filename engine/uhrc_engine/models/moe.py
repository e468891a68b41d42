"""A mixture of SwiGLU experts: each token goes through its top-k experts, and a shared one.

A router is {"weight": float32[dim, experts], "bias"?: float32[experts]}; it gives weights
float32[N, k] and experts int32[N, k] for N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_engine.models import blocks
from uhrc_engine.models.blocks import GLU, silu_glu
from uhrc_engine.models.contract import Params, TensorReader

Route = Callable[[jax.Array, Params], tuple[jax.Array, jax.Array]]
"""(tokens [N, dim], router) -> (weights float32[N, k], experts int32[N, k])."""


def softmax_top_k(
    x: jax.Array, router: Params, top_k: int, *, renormalize: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The top k of the softmax over *all* experts, made to sum to 1 or not."""
    scores = x.astype(jnp.float32) @ router["weight"]
    scores = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights, chosen = jax.lax.top_k(scores / blocks.exact_sum(scores), top_k)
    return (weights / blocks.exact_sum(weights) if renormalize else weights), chosen


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """DeepSeek-V3's routing (2024, section 2.1.2): independent scores, a bias for the choice alone,
    and the choice limited to the best `top_groups` of `groups` groups of experts."""

    top_k: int
    groups: int
    top_groups: int
    renormalize: bool
    scale: float
    """What the weights are multiplied by in the end."""

    def __call__(self, x: jax.Array, router: Params) -> tuple[jax.Array, jax.Array]:
        """See `Route`. A group's score is the sum of its two best experts' biased scores."""
        scores = jax.nn.sigmoid(x.astype(jnp.float32) @ router["weight"])
        biased = scores + router["bias"]
        if self.top_groups < self.groups:
            grouped = biased.reshape(len(x), self.groups, -1)
            best = jax.lax.top_k(grouped, 2)[0]
            kept = jax.lax.top_k(best[..., 0] + best[..., 1], self.top_groups)[1]
            is_kept = (kept[..., None] == jnp.arange(self.groups)).any(axis=1)
            biased = jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(biased.shape)
        chosen = jax.lax.top_k(biased, self.top_k)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.renormalize:
            weights = weights / (blocks.exact_sum(weights) + 1e-20)
        return weights * self.scale, chosen


def feed_forward(layer: Params, x: jax.Array, route: Route, glu: GLU = silu_glu) -> jax.Array:
    """A layer's feed-forward [R, W, dim]: "mlp" (dense, or the shared expert), routed "experts", or
    the sum of both, as the layer has them. A "shared_gate" [dim, 1] weighs the shared expert. glu:
    what is between the projections of each.
    """
    shared = blocks.swiglu(x, layer["mlp"], glu) if "mlp" in layer else None
    if "experts" not in layer:
        assert shared is not None
        return shared
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = route(tokens, layer["router"])
    routed = experts(tokens, (weights, chosen), layer["experts"], glu).reshape(x.shape)
    if shared is None:
        return routed
    if "shared_gate" in layer:
        shared = shared * jax.nn.sigmoid(blocks.linear(x, layer["shared_gate"]))
    return shared + routed


def experts(
    x: jax.Array, routed: tuple[jax.Array, jax.Array], layer: Params, glu: GLU = silu_glu
) -> jax.Array:
    """sum_k weights[n, k] * swiglu(x[n], expert chosen[n, k]) for x [N, dim].

    routed: (weights, chosen) as `Route` gives them. layer: {"gate_up": [experts, dim, 2 *
    intermediate], "down": [experts, intermediate, dim]}, and a "…_bias" [experts, out] of each
    where it has one. Tokens are sorted by expert, so that each expert is one group of a ragged
    matrix product.
    """
    weights, chosen = routed
    tokens, top_k = chosen.shape
    num_experts = layer["down"].shape[0]
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=num_experts).astype(jnp.int32)

    def project(x: jax.Array, name: str) -> jax.Array:
        y = jax.lax.ragged_dot(x, layer[name], sizes)
        bias = layer.get(f"{name}_bias")
        return y if bias is None else y + bias[chosen.reshape(-1)[order]]

    gate, up = jnp.split(project(x[order // top_k], "gate_up"), 2, axis=-1)
    out = project(glu(gate, up), "down")
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    out = out.reshape(tokens, top_k, -1) * weights[..., None].astype(x.dtype)
    # One addition after the other: the order of a short `sum` would depend on the number of tokens.
    return reduce(jnp.add, (out[:, k] for k in range(top_k)))


def take_router(tensors: TensorReader, prefix: str, shape: tuple[int, int]) -> Params:
    """The router under `prefix` ("….gate"), stored as shape (experts, hidden), with its bias if it
    has one (e_score_correction_bias, or expert_bias in Ling)."""
    router = {"weight": blocks.to_device(tensors.take(f"{prefix}.weight", shape).T, jnp.float32)}
    for name in (f"{prefix}.e_score_correction_bias", f"{prefix}.expert_bias"):
        if name in tensors:
            router["bias"] = blocks.to_device(tensors.take(name, shape[:1]), jnp.float32)
    return router


def take_experts(
    tensors: TensorReader, prefix: str, count: int, dims: tuple[int, int], dtype: Any
) -> Params:
    """The experts under `prefix` ("….experts"), stacked; dims: (hidden, intermediate).

    They are stored one by one, as gate_proj, up_proj and down_proj or as w1, w3 and w2, or all in
    one gate_up_proj [experts, 2 * intermediate, hidden] and one down_proj.
    """
    hidden, intermediate = dims
    if f"{prefix}.gate_up_proj" in tensors:
        gate_up = tensors.take(f"{prefix}.gate_up_proj", (count, 2 * intermediate, hidden))
        down = tensors.take(f"{prefix}.down_proj", (count, hidden, intermediate))
        return {
            "gate_up": blocks.to_device(gate_up.swapaxes(1, 2), dtype),
            "down": blocks.to_device(down.swapaxes(1, 2), dtype),
        }
    short = f"{prefix}.0.w1.weight" in tensors
    gate, up, down = ("w1", "w3", "w2") if short else ("gate_proj", "up_proj", "down_proj")

    def stacked(name: str, shape: tuple[int, int]) -> np.ndarray:
        parts = (tensors.take(f"{prefix}.{e}.{name}.weight", shape) for e in range(count))
        return np.stack([part.T for part in parts])

    wide = (intermediate, hidden)
    gate_up = np.concatenate([stacked(gate, wide), stacked(up, wide)], axis=-1)
    return {
        "gate_up": blocks.to_device(gate_up, dtype),
        "down": blocks.to_device(stacked(down, (hidden, intermediate)), dtype),
    }


@dataclass(frozen=True, slots=True)
class DeepSeekFeedForward:
    """All feed-forwards of a model after DeepSeek-V3's fashion, in elements: some layers are dense,
    the others have a shared expert and routed ones with a biased sigmoid router."""

    hidden: int
    dense_layers: frozenset[int]
    dense_intermediate: int
    intermediate: int
    shared_intermediate: int
    experts: int
    routing: SigmoidRouting

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, dense_layers: int) -> DeepSeekFeedForward:
        """Reads Kimi's names, Ling's, and those transformers writes either back under.

        dense_layers: how many of the first layers are dense where the config does not say.
        """

        def either(*names: str, default: float | None = None) -> Any:
            present = [config[name] for name in names if config.get(name) is not None]
            if not present and default is None:
                raise KeyError(names[0])
            return present[0] if present else default

        kinds = config.get("mlp_layer_types")
        if kinds is None:
            first = config.get("first_k_dense_replace", dense_layers)
            kinds = ["dense" if i < first else "sparse" for i in range(config["num_hidden_layers"])]
        size = config["moe_intermediate_size"]
        shared_size = config.get("moe_shared_expert_intermediate_size") or size
        return cls(
            hidden=config["hidden_size"],
            dense_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "dense"),
            dense_intermediate=config["intermediate_size"],
            intermediate=size,
            shared_intermediate=shared_size
            * either("num_shared_experts", "n_shared_experts", default=1),
            experts=either("num_experts", "num_local_experts"),
            routing=SigmoidRouting(
                top_k=either("num_experts_per_token", "num_experts_per_tok"),
                groups=either("num_expert_group", "n_group", default=1),
                top_groups=either("topk_group", default=1),
                renormalize=bool(either("moe_renormalize", "norm_topk_prob", default=True)),
                scale=either("routed_scaling_factor", default=1.0),
            ),
        )

    def take(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        """The feed-forward of layer `index` under `prefix`: its mlp or block_sparse_moe."""
        dense = index in self.dense_layers
        mlp = f"{prefix}.block_sparse_moe"
        if f"{mlp}.{'gate_proj' if dense else 'gate'}.weight" not in tensors:
            mlp = f"{prefix}.mlp"
        if dense:
            size = self.dense_intermediate
            return {"mlp": blocks.take_swiglu(tensors, mlp, self.hidden, size, dtype)}
        dims = (self.hidden, self.intermediate)
        layer: Params = {
            "router": take_router(tensors, f"{mlp}.gate", (self.experts, self.hidden)),
            "experts": take_experts(tensors, f"{mlp}.experts", self.experts, dims, dtype),
        }
        if self.shared_intermediate > 0:
            layer["mlp"] = blocks.take_swiglu(
                tensors, f"{mlp}.shared_experts", self.hidden, self.shared_intermediate, dtype
            )
        return layer
