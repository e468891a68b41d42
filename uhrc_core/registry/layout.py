"""What a pool's layout has, whatever it stores: arrays, bytes, a TPU's tiles. No jax.

A component lays its pool out as a `PoolLayout`, whose arrays know more than the core needs (how a
token or a state is packed into them); `PoolLayout.plan` is what the core gets to see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from uhrc_core.registry.plan import BufferPlan, PoolPlan, item_bytes

TPU_LANES = 128

FloatDtype = Literal["float32", "bfloat16", "float16"]
"""What values a pool may hold; in a table, the type of a key."""
FLOAT_DTYPES: tuple[str, ...] = get_args(FloatDtype)

Platform = Literal["cpu", "gpu", "tpu"]
"""Whose physical layout a pool has; in a table, the type of a key."""


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One device array of one layer; a component adds how it packs values into it.

    Attributes:
        layer: counted among the component's layers.
        name: unique in the layer.
        shape: physical, padding included.
        stored_dtype: of the array.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    stored_dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, padding included."""
        return math.prod(self.shape) * item_bytes(self.stored_dtype)


Buffer = TypeVar("Buffer", bound=BufferLayout)


@dataclass(frozen=True, slots=True)
class PoolLayout(Generic[Buffer]):
    """Every array of a pool, before any is allocated.

    Attributes:
        layers: the arrays of each layer.
        num_units: tokens or slots, over all dp ranks.
        dp_size: data-parallel ranks, each with an equal share of the units.
    """

    layers: tuple[tuple[Buffer, ...], ...]
    num_units: int
    dp_size: int

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All arrays, layer by layer."""
        return tuple(buffer for layer in self.layers for buffer in layer)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool on all devices together."""
        return sum(buffer.num_bytes for buffer in self.buffers)

    @property
    def bytes_per_unit(self) -> int:
        """Bytes that one token or slot costs over all layers, padding included."""
        return self.total_bytes // self.num_units

    @property
    def plan(self) -> PoolPlan:
        """What the core needs to know of it."""
        buffers = (
            BufferPlan(f"layer{each.layer}.{each.name}", each.shape, each.stored_dtype)
            for each in self.buffers
        )
        return PoolPlan(tuple(buffers), self.num_units)


def size_problems(sizes: Mapping[str, int]) -> list[str]:
    """What is no positive number, a line each."""
    return [
        f"{name} = {value}: must be a positive integer"
        for name, value in sizes.items()
        if value < 1
    ]


def tpu_lanes(width: int) -> int:
    """The whole 128-lane tiles that a row of ``width`` values takes."""
    return -(-width // TPU_LANES) * TPU_LANES


def tpu_rows(num_rows: int) -> int:
    """2, 4 or a multiple of 8 rows: with so many a TPU updates a pool in place (measured; with one
    row it copies the pool)."""
    return next((n for n in (2, 4) if num_rows <= n), -(-num_rows // 8) * 8)
