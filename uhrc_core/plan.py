"""What a device pool will look like, as data: no jax, so that a config can be sized and described.

A plugin turns the model's layers into `LayerKind`s, a component plans the buffers those layers
need, and only `make_device_pool` allocates them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from uhrc_core.node import ComponentType


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one model layer stores per token or per sequence, and in which component.

    Attributes:
        component: the component whose pool holds this layer's data.
        shape: named sizes the component's plan understands, e.g. ``num_kv_heads``, ``head_dim``
            (GQA, MHA), ``kv_lora_rank``, ``qk_rope_head_dim`` (MLA).
        backend: the recurrent backend's name; empty for attention layers.
    """

    component: ComponentType
    shape: Mapping[str, int]
    backend: str = ""


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One device array: its name, physical shape and dtype (numpy name, or ``bfloat16``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        itemsize = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return math.prod(self.shape) * itemsize


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """All buffers of one component's pool.

    Attributes:
        buffers: in the order the pool allocates them.
        num_units: tokens (FULL, SWA) or slots (RECURRENT) over all dp ranks.
    """

    buffers: tuple[BufferPlan, ...]
    num_units: int

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self.buffers)

    @property
    def bytes_per_unit(self) -> float:
        """Bytes of one token or slot, padding included."""
        return self.num_bytes / self.num_units
