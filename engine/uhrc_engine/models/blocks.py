"""What several model families share: norms, projections, feed-forward, the output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from uhrc_engine.models.contract import Params, StepInputs, TensorReader
from uhrc_engine.models.errors import UnsupportedModelError

HostArray = npt.NDArray[Any]
GLU = Callable[[jax.Array, jax.Array], jax.Array]
"""(gate, up) [..., intermediate] each -> what the down projection gets."""


def require(config: Mapping[str, Any], key: str, *supported: Any) -> None:
    """Raises UnsupportedModelError when `config[key]` is present and not one of `supported`."""
    if config.get(key, supported[0]) not in supported:
        wanted = " or ".join(repr(value) for value in supported)
        raise UnsupportedModelError(
            f"{key} = {config[key]!r} is not supported; supported: {wanted}"
        )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, last axis, in float32 (Zhang and Sennrich 2019).

    Returns x's dtype; the product with a float32 weight is taken before the rounding to it.
    """
    wide = x.astype(jnp.float32)
    mean = exact_sum(wide * wide) / x.shape[-1]
    return ((wide * jax.lax.rsqrt(mean + eps)).astype(weight.dtype) * weight).astype(x.dtype)


def exact_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis, kept, in an order that the number of rows does not change.

    XLA's CPU compiler unrolls sums of fewer than 64 terms wholly, and then groups them by how many
    rows there are; zeros up to 64 terms prevent that (measured: 8 to 576 terms, 64 to 512 rows).
    """
    spare = max(0, 64 - x.shape[-1])
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, spare)]).sum(axis=-1, keepdims=True)


def linear(x: jax.Array, layer: Params) -> jax.Array:
    """x [..., in] @ weight [in, out] (+ bias [out])."""
    y = x @ layer["weight"]
    return y + layer["bias"] if "bias" in layer else y


def silu_glu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up: what is between the projections of a SwiGLU (Shazeer 2020)."""
    return jax.nn.silu(gate) * up


def swiglu(x: jax.Array, layer: Params, glu: GLU = silu_glu) -> jax.Array:
    """down(glu(gate(x), up(x))); gate and up are one matrix [in, 2 * intermediate]."""
    gate, up = jnp.split(linear(x, layer["gate_up"]), 2, axis=-1)
    return linear(glu(gate, up), layer["down"])


def last_token_logits(hidden: jax.Array, head: jax.Array, inputs: StepInputs) -> jax.Array:
    """float32[R, vocab] of each row's last new token; hidden [R, W, dim], head [vocab, dim].

    A prefill step computes one row at a time: a matrix product's bits depend on its row count below
    64 rows, and a row's logits must not depend on how many rows the step has.
    """
    last = jnp.maximum(inputs.q_lens - 1, 0)[:, None, None]
    x = jnp.take_along_axis(hidden, last, axis=1)[:, 0]

    def logits(x: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    if inputs.width == 1:
        return logits(x)
    return jax.lax.map(logits, x[:, None])[:, 0]


def take_linear(
    tensors: TensorReader, names: tuple[str, ...], shapes: tuple[tuple[int, int], ...], dtype: Any
) -> Params:
    """Projections of one input fused into {"weight": [in, sum of outs], "bias"?: [sum of outs]}.

    names: HF module names ("….q_proj"); shapes: their stored (out, in). Biases are taken when the
    checkpoint has them.
    """
    weights = [
        tensors.take(f"{name}.weight", shape) for name, shape in zip(names, shapes, strict=True)
    ]
    layer: Params = {"weight": to_device(np.concatenate(weights).T, dtype)}
    if f"{names[0]}.bias" in tensors:
        biases = [
            tensors.take(f"{name}.bias", shape[:1])
            for name, shape in zip(names, shapes, strict=True)
        ]
        layer["bias"] = to_device(np.concatenate(biases), dtype)
    return layer


def take_vector(tensors: TensorReader, name: str, size: int, dtype: Any) -> jax.Array:
    """A norm's weight [size]."""
    return to_device(tensors.take(f"{name}.weight", (size,)), dtype)


def take_centered(tensors: TensorReader, name: str, size: int) -> jax.Array:
    """1 + the weight float32[size] of a norm that is stored as its distance from 1."""
    return to_device(1 + tensors.take(f"{name}.weight", (size,)), jnp.float32)


def take_swiglu(
    tensors: TensorReader, prefix: str, hidden: int, intermediate: int, dtype: Any
) -> Params:
    """The feed-forward under `prefix` (gate_proj, up_proj, down_proj) as `swiglu` wants it."""
    names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    return {
        "gate_up": take_linear(tensors, names, ((intermediate, hidden),) * 2, dtype),
        "down": take_linear(tensors, (f"{prefix}.down_proj",), ((hidden, intermediate),), dtype),
    }


def take_embeddings(
    tensors: TensorReader,
    shape: tuple[int, int],
    tied: bool,
    dtype: Any,
    name: str = "model.embed_tokens",
) -> dict[str, jax.Array]:
    """{"embed", "head"} of shape (vocab, hidden) each; tied models share one array."""
    embed = to_device(tensors.take(f"{name}.weight", shape), dtype)
    if tied:
        tensors.skip("lm_head.weight")  # some checkpoints store the tied head again
        return {"embed": embed, "head": embed}
    return {"embed": embed, "head": to_device(tensors.take("lm_head.weight", shape), dtype)}


def to_device(array: HostArray, dtype: Any) -> jax.Array:
    """A device copy in the given dtype, row-major."""
    return jnp.asarray(np.ascontiguousarray(array), dtype)
