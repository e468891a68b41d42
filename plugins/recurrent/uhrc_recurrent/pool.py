"""The recurrent state pool on the device: the jax arrays behind a `StatePoolLayout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uhrc_core.plugin_api import InvalidIndexError
from uhrc_recurrent.kernels.slot_copy import copy_slots
from uhrc_recurrent.kernels.track_scatter import gather_slots, scatter_slots, track_scatter
from uhrc_recurrent.layout import StateBuffer, StatePoolLayout


class LayerState(NamedTuple):
    """The states of R sequences in one layer, in logical shape (jax or numpy arrays)."""

    temporal: Any
    """float32[R, heads, key_dim, value_dim]."""
    convs: tuple[Any, ...]
    """dtype[R, kernel - 1, channels] each, in the order of the backend's `StateLayout`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """One layer's arrays, physical: temporal, then each conv; [total_slots, ...] each."""

    arrays: tuple[jax.Array, ...]
    specs: tuple[StateBuffer, ...] = field(metadata={"static": True})

    def gather(self, slots: jax.Array) -> LayerState:
        """The states in slots int32[R]; zeros, a fresh sequence's state, for one out of range."""
        temporal, *convs = (
            spec.unpack(gather_slots(pool, slots))
            for spec, pool in zip(self.specs, self.arrays, strict=True)
        )
        return LayerState(temporal, tuple(convs))

    def scatter(self, state: LayerState, slots: jax.Array) -> RecurrentLayer:
        """With row r's state in slot slots[r]; a slot out of range is dropped."""
        return self._map(state, lambda pool, rows: scatter_slots(pool, rows, slots))

    def track(self, state: LayerState, track_slots: jax.Array, mask: jax.Array) -> RecurrentLayer:
        """With the states of the rows in bool[R] mask also in their track slots int32[R]."""
        return self._map(state, lambda pool, rows: track_scatter(pool, rows, track_slots, mask))

    def _map(self, state: LayerState, update: Any) -> RecurrentLayer:
        logical = (state.temporal, *state.convs)
        arrays = (
            update(pool, spec.pack(rows))
            for spec, pool, rows in zip(self.specs, self.arrays, logical, strict=True)
        )
        return replace(self, arrays=tuple(arrays))


Buffers = tuple[RecurrentLayer, ...]
"""One entry per recurrent layer: the pytree that a step donates and returns."""


class RecurrentStatePool:
    """Owns the device arrays of a `StatePoolLayout`, zero-filled at first; not who owns which slot.

    The arrays are donated to each step: pass `buffers` to a jitted function that donates them and
    hand its result to `replace`; the old ones are dead by then. No host view of them is kept (one
    would silently turn the in-place update into a copy of the pool).
    """

    def __init__(self, layout: StatePoolLayout, mesh: Mesh | None = None) -> None:
        """Allocates. With a mesh, slots are split over its axis "data" (which must divide the dp
        ranks) and heads over "tensor" where they divide evenly."""
        self.layout = layout
        self._mesh = mesh
        self._partitions = {
            spec: _partition(spec, mesh) for spec in layout.buffers if mesh is not None
        }
        self._buffers: Buffers = tuple(self._make_layer(specs) for specs in layout.layers)
        self._clone = jax.jit(self._copy_slots, donate_argnums=0)

    @property
    def buffers(self) -> Buffers:
        """The arrays as they are now. Do not hold them across a step."""
        return self._buffers

    def replace(self, buffers: Buffers) -> None:
        """Takes over the arrays that a step returned."""
        self._buffers = buffers

    def copy_slots(self, src: npt.ArrayLike, dst: npt.ArrayLike) -> None:
        """Clones the whole state of slot src[i] into slot dst[i], int[n] each, in place.

        Dispatches and returns: what is dispatched later sees the clones. dst are distinct, none of
        them is a src, and a pair stays within one dp rank. Raises InvalidIndexError otherwise.
        """
        sources, targets = self._checked(src), self._checked(dst)
        if len(sources) != len(targets):
            raise InvalidIndexError(f"{len(sources)} source slots for {len(targets)} targets")
        if len(np.unique(targets)) < len(targets) or np.isin(targets, sources).any():
            raise InvalidIndexError(
                f"copy of slots {sources.tolist()} to {targets.tolist()}: targets must be distinct "
                "and none of them a source"
            )
        if (sources // self.layout.num_slots != targets // self.layout.num_slots).any():
            raise InvalidIndexError(
                f"copy of slots {sources.tolist()} to {targets.tolist()} crosses a dp rank; each "
                f"has {self.layout.num_slots} slots"
            )
        # Whole powers of two, so that few lengths are ever compiled; a padded pair costs nothing.
        spare = (1 << (len(sources) - 1).bit_length()) - len(sources) if len(sources) else 1
        pairs = (np.pad(x, (0, spare), constant_values=-1) for x in (sources, targets))
        self._buffers = self._clone(self._buffers, *pairs)

    def zero(self, slots: npt.ArrayLike) -> None:
        """Makes slots int[n], distinct, the state of a fresh sequence, in place."""
        self._buffers = _zero(self._buffers, self._checked(slots))

    def read(self, slots: npt.ArrayLike) -> tuple[LayerState, ...]:
        """Copies the states in slots int[n], of every layer, to the host. Waits for the device.

        Raises InvalidIndexError when a slot is outside the pool.
        """
        states = _gather(self._buffers, self._checked(slots))
        return jax.tree.map(np.array, states)

    def write(self, slots: npt.ArrayLike, states: Sequence[LayerState]) -> None:
        """Stores what `read` gave (or equal shapes) in slots int[n], distinct, in place.

        Raises InvalidIndexError when a slot is outside the pool.
        """
        self._buffers = _write(self._buffers, tuple(states), self._checked(slots))

    def _checked(self, slots: npt.ArrayLike) -> npt.NDArray[np.int32]:
        indices = np.atleast_1d(np.asarray(slots, np.int32))
        outside = indices[(indices < 0) | (indices >= self.layout.num_units)]
        if outside.size:
            raise InvalidIndexError(
                f"slot {outside[0]} is outside this pool of {self.layout.num_units} slots"
            )
        return indices

    def _make_layer(self, specs: tuple[StateBuffer, ...]) -> RecurrentLayer:
        def array(spec: StateBuffer) -> jax.Array:
            device = NamedSharding(self._mesh, self._partitions[spec]) if self._mesh else None
            return jnp.zeros(spec.shape, spec.stored_dtype, device=device)

        return RecurrentLayer(tuple(array(spec) for spec in specs), specs)

    def _copy_slots(self, buffers: Buffers, src: jax.Array, dst: jax.Array) -> Buffers:
        if self._mesh is None:
            return copy_slots(buffers, src, dst)
        shards = self._mesh.shape["data"]
        per_shard = self.layout.num_units // shards

        def copy_own(buffers: Buffers, src: jax.Array, dst: jax.Array) -> Buffers:
            # Slots of other shards fall out of range here, and so are dropped.
            first = jax.lax.axis_index("data") * per_shard
            return copy_slots(buffers, src - first, dst - first)

        partitions = tuple(
            RecurrentLayer(tuple(self._partitions[s] for s in layer.specs), layer.specs)  # pyright: ignore[reportArgumentType]
            for layer in buffers
        )
        everywhere = PartitionSpec()
        return jax.shard_map(
            copy_own,
            mesh=self._mesh,
            in_specs=(partitions, everywhere, everywhere),
            out_specs=partitions,
        )(buffers, src, dst)


def _partition(spec: StateBuffer, mesh: Mesh) -> PartitionSpec:
    """Slots over "data"; heads over "tensor": a temporal's first axis, a conv's channels."""
    tensor = mesh.shape["tensor"]
    if heads := spec.cell.shape[:-2]:
        return PartitionSpec("data", "tensor" if heads[0] % tensor == 0 else None)
    whole = spec.cell.lanes == spec.cell.shape[-1] and spec.cell.lanes % tensor == 0
    return PartitionSpec("data", None, "tensor" if whole else None)


@jax.jit
def _gather(buffers: Buffers, slots: jax.Array) -> tuple[LayerState, ...]:
    return tuple(layer.gather(slots) for layer in buffers)


@partial(jax.jit, donate_argnums=0)
def _write(buffers: Buffers, states: tuple[LayerState, ...], slots: jax.Array) -> Buffers:
    return tuple(layer.scatter(state, slots) for layer, state in zip(buffers, states, strict=True))


@partial(jax.jit, donate_argnums=0)
def _zero(buffers: Buffers, slots: jax.Array) -> Buffers:
    def zero(pool: jax.Array) -> jax.Array:
        return scatter_slots(pool, jnp.zeros((len(slots), *pool.shape[1:]), pool.dtype), slots)

    return jax.tree.map(zero, buffers)
