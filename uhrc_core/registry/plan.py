"""What a device pool will look like, as data: no jax, so that a config can be sized and described.

A plugin turns the model's layers into `LayerKind`s, a component plans the buffers those layers
need, and only `make_device_pool` allocates them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from uhrc_core.kinds import ComponentType


def item_bytes(dtype: str) -> int:
    """Bytes of one value of a dtype, by numpy's name for it or ``bfloat16``.

    Raises TypeError for a name that numpy does not know.
    """
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _known(dtype: str) -> str:
    item_bytes(dtype)
    return dtype


Size = Annotated[int, Field(ge=0)]


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
    shape: Mapping[str, Size]
    backend: str = ""


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One device array: its name, physical shape and dtype (numpy name, or ``bfloat16``)."""

    name: str
    shape: tuple[Size, ...]
    dtype: Annotated[str, AfterValidator(_known)]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """All buffers of one component's pool.

    Attributes:
        buffers: in the order the pool allocates them.
        num_units: tokens (FULL, SWA) or slots (RECURRENT) over all dp ranks.
    """

    buffers: tuple[BufferPlan, ...]
    num_units: Annotated[int, Field(ge=1)]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self.buffers)

    @property
    def bytes_per_unit(self) -> float:
        """Bytes of one token or slot, padding included."""
        return self.num_bytes / self.num_units
