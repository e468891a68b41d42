"""Runs a model's steps on static shapes: buckets, compilation, donation of the pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from uhrc_engine.models.contract import Model, Params, StepInputs


class DevicePool(Protocol):
    """What the runner needs of a component's device pool (`uhrc_full.pool.FullKVPool` is one)."""

    @property
    def buffers(self) -> Any:
        """The pytree of jax arrays; donated into each step, dead afterwards."""
        ...

    def replace(self, buffers: Any) -> None:
        """Takes the buffers that a step returned."""
        ...


class Bucket(NamedTuple):
    """A compiled step shape."""

    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The step shapes to compile. Prefill shapes have rows * width >= 64, so that their results do
    not depend on what else is in the step; decode shapes have width 1."""

    prefill: tuple[Bucket, ...] = (Bucket(1, 64), Bucket(1, 256))
    decode_rows: tuple[int, ...] = (1, 4, 8)


class Runner:
    """Owns the params and drives the pools; one jitted function per bucket.

    `pools` maps component kinds to device pools; every step donates their buffers and replaces them.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        pools: Mapping[str, DevicePool],
        buckets: Buckets | None = None,
        *,
        max_pages: int,
    ) -> None:
        """`max_pages`: width of the page table = ceil(max context / page_size)."""
        raise NotImplementedError

    def bucket_for(self, rows: int, width: int) -> Bucket:
        """The smallest bucket that holds `rows` x `width`. Raises ValueError when none does."""
        raise NotImplementedError

    def step(self, inputs: StepInputs) -> jax.Array:
        """One forward of inputs of any R, W that a bucket holds; the runner pads.

        Returns logits float32[bucket rows, vocab] on the device, of each row's last valid token;
        rows from `inputs.rows` on are padding. Dispatched asynchronously: reading it waits.
        """
        raise NotImplementedError

    def warmup(self) -> None:
        """Compiles every bucket (with padding rows only: the pools are not written)."""
        raise NotImplementedError

    @property
    def compile_count(self) -> int:
        """Step programs compiled so far; constant after `warmup()`."""
        raise NotImplementedError
