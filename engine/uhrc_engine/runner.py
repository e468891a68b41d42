"""Runs a model's steps on static shapes: buckets, compilation, donation of the pools."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import jax
import numpy as np

from uhrc_core.kinds import ComponentType
from uhrc_engine.models.contract import (
    PADDING_INDEX,
    Caches,
    Model,
    Params,
    StepInputs,
    TokenPlaces,
)

EXACT_ROWS = 64
"""Rows of a matrix product from which on XLA's CPU kernels give a row the same bits whatever the
number of rows. Prefill steps have at least this many."""

_EXACT_ON_CPU: dict[str, str | bool] = {
    "xla_cpu_experimental_ynn_fusion_type": "",
    "xla_cpu_multi_thread_eigen": True,
}
"""Compile options of prefill steps on a CPU: a row's bits do not depend on the rows beside it.

On processors with AVX2 alone they would, in two kinds of matrix products: those of YNNPACK, whose
kernels are chosen by the step's shape and the processor, and Eigen's on a single thread. Prefill is
as fast so; decode, whose shapes do not change, would be half as fast without YNNPACK and keeps it.
"""


class DevicePool(Protocol):
    """What the runner needs of a component's device pool (`uhrc_full.pool.KVPool` is one)."""

    @property
    def buffers(self) -> Any:
        """The pytree of jax arrays; donated into each step, dead afterwards."""
        ...

    def replace(self, buffers: Any) -> None:
        """Takes the buffers that a step returned."""
        ...


class StatePool(DevicePool, Protocol):
    """A pool of recurrent states (`uhrc_recurrent.pool.RecurrentStatePool` is one)."""

    def copy_slots(self, src: Any, dst: Any) -> None:
        """Clones the whole state of slot src[i] into slot dst[i], in place, dispatched."""
        ...


class Bucket(NamedTuple):
    """A compiled step shape."""

    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The step shapes to compile.

    Prefill shapes have rows * width >= EXACT_ROWS, so that a row's results do not depend on what
    else is in the step; decode shapes have width 1. Raises ValueError otherwise.
    """

    prefill: tuple[Bucket, ...] = (Bucket(1, 64), Bucket(1, 256))
    decode_rows: tuple[int, ...] = (1, 4, 8)

    def __post_init__(self) -> None:
        for bucket in self.prefill:
            if bucket.width < 2 or bucket.rows * bucket.width < EXACT_ROWS:
                raise ValueError(
                    f"prefill bucket {tuple(bucket)} has fewer than {EXACT_ROWS} token rows; "
                    "its results would depend on the batch"
                )
        if not self.decode_rows or min(self.decode_rows) < 1:
            raise ValueError(f"decode_rows = {self.decode_rows}: give at least one positive number")

    @property
    def all(self) -> tuple[Bucket, ...]:
        """Every shape, cheapest first."""
        decode = (Bucket(rows, 1) for rows in self.decode_rows)
        return tuple(sorted({*self.prefill, *decode}, key=lambda b: (b.rows * b.width, b.rows)))


class Runner:
    """Owns the params and drives the pools; one compiled program per bucket.

    `pools` maps component kinds to device pools. Every step donates their buffers and replaces
    them, so nobody else may hold them across a step.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        pools: Mapping[ComponentType, DevicePool],
        buckets: Buckets | None = None,
        *,
        max_pages: int,
    ) -> None:
        """`max_pages`: width of the page table = ceil(max context / page_size)."""
        self.model, self.params, self.pools = model, params, pools
        self.buckets = buckets or Buckets()
        self.max_pages = max_pages
        self._programs: dict[Bucket, jax.stages.Compiled] = {}

    def bucket_for(self, rows: int, width: int) -> Bucket:
        """The cheapest bucket that holds rows x width; a decode (width 1) takes decode buckets.

        Raises ValueError when none does.
        """
        for bucket in self.buckets.all:
            if bucket.rows >= rows and bucket.width >= width and (bucket.width > 1) == (width > 1):
                return bucket
        raise ValueError(
            f"no bucket holds a step of {rows} rows x {width} tokens; there are "
            f"{', '.join(f'{b.rows}x{b.width}' for b in self.buckets.all)}"
        )

    def step(self, inputs: StepInputs) -> jax.Array:
        """One forward of inputs of any R, W that a bucket holds; the runner pads.

        Width 1 is a decode step. A prefill chunk of one token must be given width >= 2 (its second
        column padding) to be computed as a prefill.

        Returns logits float32[bucket rows, vocab] on the device, of each row's last valid token;
        rows from `inputs.rows` on are padding. Dispatched asynchronously: reading it waits.
        """
        bucket = self.bucket_for(inputs.rows, inputs.width)
        caches: Caches = {kind: pool.buffers for kind, pool in self.pools.items()}
        logits, caches = self.program(bucket)(
            self.params, caches, pad_inputs(inputs, bucket, self.max_pages)
        )
        for kind, pool in self.pools.items():
            pool.replace(caches[kind])
        return logits

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Dispatches the clone of each (source, target) pair of recurrent slots.

        One at a time, so that one program serves any number. For a model with recurrent layers.
        """
        pool = cast("StatePool", self.pools[ComponentType.RECURRENT])
        for source, target in pairs:
            pool.copy_slots([source], [target])

    def warmup(self) -> None:
        """Compiles every bucket, several at a time. Computes nothing: what is stored stays."""
        if ComponentType.RECURRENT in self.pools:
            cast("StatePool", self.pools[ComponentType.RECURRENT]).copy_slots([], [])
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(self.program, self.buckets.all))

    @property
    def compile_count(self) -> int:
        """Step programs compiled so far; constant after `warmup()`."""
        return len(self._programs)

    def program(self, bucket: Bucket) -> jax.stages.Compiled:
        """The compiled step of a bucket (compiled now if it was not), with its memory analysis."""
        if bucket not in self._programs:
            caches = {kind: pool.buffers for kind, pool in self.pools.items()}
            inputs = pad_inputs(_no_rows(self.model, self.max_pages), bucket, self.max_pages)
            jitted = jax.jit(self.model.forward, donate_argnums=1)
            exact = bucket.width > 1 and jax.default_backend() == "cpu"
            self._programs[bucket] = jitted.lower(self.params, caches, inputs).compile(
                _EXACT_ON_CPU if exact else None
            )
        return self._programs[bucket]


def _no_rows(model: Model, max_pages: int) -> StepInputs:
    empty = np.zeros((0, 1), np.int32)
    lens = np.zeros(0, np.int32)
    pages = np.zeros((0, max_pages), np.int32)
    places = {kind: TokenPlaces(empty, pages) for kind in model.paged_components}
    return StepInputs(empty, empty, places, lens, lens, lens, lens)


def pad_inputs(inputs: StepInputs, bucket: Bucket, max_pages: int) -> StepInputs:
    """The inputs grown to the bucket's shape with rows and columns that write and see nothing."""

    def grow(array: Any, shape: tuple[int, ...], fill: int) -> np.ndarray:
        array = np.asarray(array, np.int32)
        if array.shape == shape:
            return array
        full = np.full(shape, fill, np.int32)
        full[tuple(slice(n) for n in array.shape)] = array
        return full

    rows, tokens, nowhere = (bucket.rows,), (bucket.rows, bucket.width), int(PADDING_INDEX)
    return StepInputs(
        token_ids=grow(inputs.token_ids, tokens, 0),
        positions=grow(inputs.positions, tokens, 0),
        places={
            kind: TokenPlaces(
                grow(places.write_indices, tokens, nowhere),
                grow(places.page_table, (bucket.rows, max_pages), 0),
            )
            for kind, places in inputs.places.items()
        },
        kv_lens=grow(inputs.kv_lens, rows, 0),
        q_lens=grow(inputs.q_lens, rows, 0),
        state_slots=grow(inputs.state_slots, rows, nowhere),
        track_slots=grow(inputs.track_slots, rows, nowhere),
    )
