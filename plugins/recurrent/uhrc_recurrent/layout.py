"""How the recurrent states lie in memory: pure data and arithmetic, no jax.

The kernels think in *logical* shapes, those of a backend's `StateLayout`: temporal
`(heads, key_dim, value_dim)`, conv `(kernel - 1, channels)`. What is stored is the *physical* shape
of `CellLayout`, chosen here per platform and seen by nobody outside this package: a TPU updates a
pool in place only when the last two dimensions fill its tiles. On CPU and GPU both shapes are the
same, but a CPU stores bfloat16 as uint16: XLA widens a bfloat16 pool to float32 and back, the whole
of it, at each scatter.

Every layer has its own arrays, slots first, so that a step updates each where it lies. With
`dp_size` ranks the pool holds `dp_size * num_slots` slots; rank d's local slot i is slot
`d * num_slots + i` (the caller adds the offset).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from uhrc_core.plugin_api import (
    FLOAT_DTYPES,
    MODEL_DTYPE,
    TPU_LANES,
    BufferLayout,
    BufferShape,
    ConfigError,
    PoolLayout,
    StateLayout,
    size_problems,
    tpu_lanes,
    tpu_rows,
)


@dataclass(frozen=True, slots=True)
class CellLayout:
    """Physical place of one buffer of one slot: `lead + (rows, lanes)`, zero-padded.

    The last two logical axes (a, b) are kept, `rows >= a` and `lanes >= b`, or, when `folded`, seen
    as one run of a * b values cut into rows of `lanes`.
    """

    shape: tuple[int, ...]
    """Logical."""
    rows: int
    lanes: int
    folded: bool

    @classmethod
    def for_platform(cls, shape: tuple[int, ...], platform: str) -> CellLayout:
        """The layout that `platform` ("cpu", "gpu", "tpu") updates in place without copies.

        TPU: rows of whole 128-lane tiles, and as many as `tpu_rows` says. Values narrower than a
        row of lanes share one if they have heads before them (a temporal state), else are padded.
        """
        *lead, height, width = shape
        if platform != "tpu":
            return cls(shape, height, width, folded=False)
        folded = bool(lead) and width % TPU_LANES != 0
        needed = -(-height * width // TPU_LANES) if folded else height
        lanes = TPU_LANES if folded else tpu_lanes(width)
        return cls(shape, tpu_rows(needed), lanes, folded)

    @property
    def physical_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], self.rows, self.lanes)

    @property
    def is_identity(self) -> bool:
        """Whether logical and physical shapes are the same."""
        return self.physical_shape == self.shape

    def pack(self, logical: Any) -> Any:
        """[n, *shape] -> [n, *physical_shape] (numpy or jax array)."""
        if self.is_identity:
            return logical
        xp = logical.__array_namespace__()
        keep = [(0, 0)] * (logical.ndim - 2)
        if not self.folded:
            spare = (self.rows - self.shape[-2], self.lanes - self.shape[-1])
            return xp.pad(logical, [*keep, (0, spare[0]), (0, spare[1])])
        run = logical.reshape(*logical.shape[:-2], self._run)
        run = xp.pad(run, [*keep, (0, self.rows * self.lanes - self._run)])
        return run.reshape(*logical.shape[:-2], self.rows, self.lanes)

    def unpack(self, physical: Any) -> Any:
        """[n, *physical_shape] -> [n, *shape]: the inverse of `pack`."""
        if self.is_identity:
            return physical
        if not self.folded:
            return physical[..., : self.shape[-2], : self.shape[-1]]
        lead = physical.shape[:-2]
        run = physical.reshape(*lead, self.rows * self.lanes)[..., : self._run]
        return run.reshape(*lead, *self.shape[-2:])

    @property
    def _run(self) -> int:
        return self.shape[-2] * self.shape[-1]


@dataclass(frozen=True, slots=True)
class StateBuffer(BufferLayout):
    """One array of the pool: a buffer of a recurrent layer, (slots, *cell.physical_shape)."""

    cell: CellLayout
    dtype: str
    """What the kernels see; stored is the same, or uint16 with the bits of a bfloat16."""

    def pack(self, logical: Any) -> Any:
        """[n, *logical shape] in any float dtype -> rows of the array."""
        return self.cell.pack(logical.astype(self.dtype)).view(self.stored_dtype)

    def unpack(self, rows: Any) -> Any:
        """Rows of the array -> [n, *logical shape] in `dtype`."""
        return self.cell.unpack(rows.view(self.dtype))


class StatePoolLayout(PoolLayout[StateBuffer]):
    """Every array of a recurrent state pool: temporal, then each conv; its units are slots."""

    @property
    def num_slots(self) -> int:
        """Per dp rank."""
        return self.num_units // self.dp_size


def lay_out(
    states: Sequence[StateLayout],
    *,
    num_slots: int,
    dp_size: int = 1,
    model_dtype: str = "float32",
    platform: str = "cpu",
) -> StatePoolLayout:
    """Lays out a pool of `num_slots` slots per dp rank for recurrent layers with these states.

    `model_dtype` is the dtype the model runs in, which its conv states take. Raises ConfigError,
    listing every problem, when a size is not positive, there is no layer, or a dtype is unknown.
    """
    problems = size_problems({"num_slots": num_slots, "dp_size": dp_size})
    if not states:
        problems.append("the model has no recurrent layer: it needs no recurrent state pool")
    if model_dtype not in FLOAT_DTYPES:
        problems.append(
            f"dtype = {model_dtype!r}: conv states are one of {', '.join(FLOAT_DTYPES)}"
        )
    if problems:
        raise ConfigError(problems)

    def buffer(layer: int, logical: BufferShape) -> StateBuffer:
        dtype = model_dtype if logical.dtype == MODEL_DTYPE else logical.dtype
        stored = "uint16" if platform == "cpu" and dtype == "bfloat16" else dtype
        cell = CellLayout.for_platform(logical.shape, platform)
        shape = (num_slots * dp_size, *cell.physical_shape)
        return StateBuffer(layer, logical.name, shape, stored, cell, dtype)

    layers = tuple(tuple(buffer(i, b) for b in state.buffers) for i, state in enumerate(states))
    return StatePoolLayout(layers, num_slots * dp_size, dp_size)
