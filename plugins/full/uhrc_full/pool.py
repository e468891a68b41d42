"""A paged KV pool on the device: the jax arrays behind a `KVLayout`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uhrc_core.plugin_api import InvalidIndexError
from uhrc_full.kernels.kv_update import kv_update
from uhrc_full.layout import KVBuffer, KVLayout, LaneLayout, MLAShape, RowLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's K and V pools: dtype[pages, page_size, *token.shape] each."""

    k: jax.Array
    v: jax.Array
    token: RowLayout = field(metadata={"static": True})

    def write(self, k: jax.Array, v: jax.Array, token_indices: jax.Array) -> KVLayer:
        """With k, v [N, kv_heads, head_dim] at int32[N] token indices; out of range is dropped."""
        return replace(
            self,
            k=kv_update(self.k, self.token.pack(k), token_indices),
            v=kv_update(self.v, self.token.pack(v), token_indices),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LatentLayer:
    """One MLA layer's latent pool: dtype[pages, page_size, *token.shape]."""

    latent: jax.Array
    kv_lora_rank: int = field(metadata={"static": True})
    token: LaneLayout = field(metadata={"static": True})

    def write(self, latent: jax.Array, token_indices: jax.Array) -> LatentLayer:
        """With latent [N, kv_lora_rank + qk_rope_head_dim]; out of range is dropped."""
        rows = self.token.pack(latent)
        return replace(self, latent=kv_update(self.latent, rows, token_indices))


Buffers = tuple[KVLayer | LatentLayer, ...]
"""One entry per layer: the pytree that a step donates and returns."""
LayerArrays = tuple[npt.NDArray[Any], ...]
"""One layer on the host, logical: (k, v) each [n, kv_heads, head_dim], or (latent [n, dim],)."""


class KVPool:
    """Owns the device arrays of a `KVLayout`, zero-filled at first.

    The arrays are donated to each step: pass `buffers` to a jitted function that donates them and
    hand its result to `replace`; the old ones are dead by then. No host view of them is kept (one
    would silently turn the in-place update into a copy of the pool).
    """

    def __init__(self, layout: KVLayout, mesh: Mesh | None = None) -> None:
        """Allocates. With a mesh, pages are split over its axis "data" and the rows of KV heads
        over "tensor" where they divide evenly."""
        self.layout = layout
        self._buffers: Buffers = tuple(
            _make_layer(layout, layer, mesh) for layer in range(len(layout.layers))
        )

    @property
    def buffers(self) -> Buffers:
        """The arrays as they are now. Do not hold them across a step."""
        return self._buffers

    def replace(self, buffers: Buffers) -> None:
        """Takes over the arrays that a step returned."""
        self._buffers = buffers

    def read(self, token_indices: npt.ArrayLike) -> tuple[LayerArrays, ...]:
        """Copies the tokens int[n] of every layer to the host, in logical shape.

        Raises InvalidIndexError when an index is outside the pool. Waits for the device.
        """
        indices = self._checked(token_indices)
        return tuple(
            tuple(np.array(spec.token.unpack(_gather(pool, indices))) for spec, pool in pairs)
            for pairs in self._pairs()
        )

    def write(self, token_indices: npt.ArrayLike, layers: tuple[LayerArrays, ...]) -> None:
        """Stores what `read` gave (or equal shapes) at the tokens int[n], distinct, in place.

        For host tiers and tests: compiles once per n. Raises InvalidIndexError when an index is
        outside the pool.
        """
        indices = self._checked(token_indices)
        self._buffers = _write_layers(self._buffers, layers, indices)

    def _pairs(self) -> list[list[tuple[KVBuffer, jax.Array]]]:
        """Each layer's specs beside their arrays."""
        return [
            list(zip(specs, jax.tree.leaves(layer), strict=True))
            for specs, layer in zip(self.layout.layers, self._buffers, strict=True)
        ]

    def _checked(self, token_indices: npt.ArrayLike) -> npt.NDArray[np.int32]:
        indices = np.asarray(token_indices, np.int32)
        outside = indices[(indices < 0) | (indices >= self.layout.num_units)]
        if outside.size:
            raise InvalidIndexError(
                f"token index {outside[0]} is outside this pool of {self.layout.num_units} tokens"
            )
        return indices


def _make_layer(layout: KVLayout, layer: int, mesh: Mesh | None) -> KVLayer | LatentLayer:
    specs, shape = layout.layers[layer], layout.shapes[layer]
    arrays = [jnp.zeros(s.shape, s.stored_dtype, device=_sharding(s, mesh)) for s in specs]
    match shape, specs[0].token:
        case MLAShape(kv_lora_rank=rank), LaneLayout() as token:
            return LatentLayer(arrays[0], rank, token)
        case _, RowLayout() as token:
            return KVLayer(arrays[0], arrays[1], token)
        case unknown:
            raise AssertionError(unknown)


def _sharding(spec: KVBuffer, mesh: Mesh | None) -> NamedSharding | None:
    if mesh is None:
        return None
    by_head = isinstance(spec.token, RowLayout) and spec.token.rows % mesh.shape["tensor"] == 0
    return NamedSharding(mesh, PartitionSpec("data", None, "tensor" if by_head else None))


@jax.jit
def _gather(pool: jax.Array, token_indices: jax.Array) -> jax.Array:
    return pool.reshape(-1, *pool.shape[2:])[token_indices]


@jax.jit(donate_argnums=0)
def _write_layers(
    buffers: Buffers, layers: tuple[LayerArrays, ...], token_indices: jax.Array
) -> Buffers:
    def write(layer: KVLayer | LatentLayer, arrays: Any) -> KVLayer | LatentLayer:
        match layer:
            case KVLayer():
                k, v = arrays
                return layer.write(k, v, token_indices)
            case LatentLayer():
                (latent,) = arrays
                return layer.write(latent, token_indices)

    return tuple(write(layer, arrays) for layer, arrays in zip(buffers, layers, strict=True))
