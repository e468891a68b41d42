"""What a model is to the engine: shapes, a pure forward, and the pools its layers need.

A model never sees a request, a tree or an allocator. It gets arrays (`StepInputs`) and pool buffers
(`Caches`) and returns logits and the buffers with the new tokens written. `forward` is traced by
`jax.jit`: it may not branch on array values.

Letters in shapes: R rows (requests in the step, padded), W width (new tokens per row, padded),
P pages per row in the page table (padded).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from uhrc_core.indices import page_ceil
from uhrc_core.kinds import ComponentType

IntArray = npt.NDArray[np.int32]
StepArray = Any
"""int32: numpy on the way in, a traced `jax.Array` inside a model."""
Params = dict[str, Any]
"""A pytree of weights (`jax.Array` leaves). Its structure is the model's own business."""
Caches = dict[ComponentType, Any]
"""By component kind, a pytree of that component's pool buffers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Where the rows' tokens lie in one component's paged pool."""

    write_indices: StepArray
    """int32[R, W] pool token index that receives each new token's KV.
    Padding: any index >= the pool's token count (`PADDING_INDEX`); such a token writes nothing."""
    page_table: StepArray
    """int32[R, P] page index of each page of the row's sequence, in order; 0 for a page that the
    row does not hold (any more): after its end, or before its window. Such an entry is never read
    as data."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward step for R rows of up to W new tokens each.

    Row r brings `q_lens[r]` new tokens in columns `[0, q_lens[r])`; the other columns are padding.
    Its sequence is `kv_lens[r]` tokens long *including* the new ones, so that new token w has the
    absolute position `kv_lens[r] - q_lens[r] + w`. A padding row has `q_lens == kv_lens == 0`.
    """

    token_ids: StepArray
    """int32[R, W]. Padding: any valid id (0)."""
    positions: StepArray
    """int32[R, W] absolute positions, 0-based. Padding: any value >= 0 (0)."""
    places: dict[ComponentType, TokenPlaces]
    """By component kind, one entry for each of the model's `paged_components`."""
    kv_lens: StepArray
    """int32[R] tokens of the row's sequence, the new ones included."""
    q_lens: StepArray
    """int32[R] new tokens of the row."""
    state_slots: StepArray
    """int32[R] global slot of the row's running recurrent state: read (unless the row has computed
    nothing yet, `kv_lens == q_lens`: it starts from zeros), then overwritten with its final state.
    Distinct where in range. Padding rows and models without recurrent layers: `PADDING_INDEX`."""
    track_slots: StepArray
    """int32[R] global slot that receives the row's final state as well; `PADDING_INDEX` for none.
    Distinct where in range, and no `state_slots` of this step."""

    @property
    def rows(self) -> int:
        """R."""
        return self.token_ids.shape[0]

    @property
    def width(self) -> int:
        """W."""
        return self.token_ids.shape[1]


PADDING_INDEX = np.int32(np.iinfo(np.int32).max)
"""The write index of a padding token, the slot of a padding row: beyond every pool, so that the
write is dropped."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One request's share of a step, in the caller's terms (see `make_step_inputs`)."""

    token_ids: Sequence[int] | IntArray
    """int32[n] the new tokens, n >= 1."""
    start: int
    """Absolute position of the first new token = tokens already in the pool for this row."""
    page_tables: Mapping[ComponentType, IntArray]
    """By component kind, int32[>= pages of start + n tokens]: the pool's pages that hold the
    sequence, in order; -1 for a page that no layer of that component can see any more."""
    state_slot: int | None = None
    """Global slot of the running recurrent state; None only for a model without one."""
    track_slot: int | None = None
    """Global slot that receives a copy of the state after the last new token; None for no copy."""


def make_step_inputs(
    rows: Sequence[StepRow], *, width: int, max_pages: int, page_size: int
) -> StepInputs:
    """Packs rows into fresh numpy arrays of shape [len(rows), width]; the Runner pads the rows.

    All rows name the same components in `page_tables`; so do the inputs' `places`.

    Raises ValueError when a row is empty, longer than `width`, needs more than `max_pages` pages,
    has fewer pages than its tokens fill, or no place for a new one.
    """
    count = len(rows)
    token_ids = np.zeros((count, width), np.int32)
    positions = np.zeros((count, width), np.int32)
    kv_lens = np.zeros(count, np.int32)
    q_lens = np.zeros(count, np.int32)
    state_slots = np.full(count, PADDING_INDEX, np.int32)
    track_slots = np.full(count, PADDING_INDEX, np.int32)
    for r, row in enumerate(rows):
        n, end = len(row.token_ids), row.start + len(row.token_ids)
        pages = page_ceil(end, page_size) // page_size
        if not 1 <= n <= width:
            raise ValueError(f"row {r} has {n} new tokens; this step takes 1 to {width}")
        if pages > max_pages:
            raise ValueError(f"row {r} needs {pages} pages; the page table holds {max_pages}")
        token_ids[r, :n] = row.token_ids
        positions[r, :n] = np.arange(row.start, end)
        kv_lens[r], q_lens[r] = end, n
        if row.state_slot is not None:
            state_slots[r] = row.state_slot
        if row.track_slot is not None:
            track_slots[r] = row.track_slot
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        places={
            kind: _token_places(rows, kind, width, max_pages, page_size)
            for kind in (rows[0].page_tables if rows else ())
        },
        kv_lens=kv_lens,
        q_lens=q_lens,
        state_slots=state_slots,
        track_slots=track_slots,
    )


def _token_places(
    rows: Sequence[StepRow], kind: ComponentType, width: int, max_pages: int, page_size: int
) -> TokenPlaces:
    """Of the rows in one component's pool; raises as `make_step_inputs`."""
    write_indices = np.full((len(rows), width), PADDING_INDEX, np.int32)
    page_table = np.zeros((len(rows), max_pages), np.int32)
    for r, row in enumerate(rows):
        start, end = row.start, row.start + len(row.token_ids)
        num_pages = page_ceil(end, page_size) // page_size
        pages = row.page_tables[kind][:num_pages]
        if len(pages) < num_pages:
            raise ValueError(f"row {r}: {len(pages)} pages ({kind.name}) for {end} tokens")
        written = np.asarray(pages[start // page_size :])
        if written.min() < 0:
            raise ValueError(f"row {r}: a new token has no place in the {kind.name} pool (-1)")
        first = start // page_size * page_size
        indices = (written[:, None] * page_size + np.arange(page_size)).reshape(-1)
        write_indices[r, : end - start] = indices[start - first : end - first]
        np.maximum(pages, 0, out=page_table[r, :num_pages])
    return TokenPlaces(write_indices, page_table)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps between steps: data, so that a new layer kind is a new value here.

    `component` names the pool; `shape` is that component's own description of one layer
    (`uhrc_full.layout.GQAShape` or `MLAShape`; `uhrc_core.plugin_api.StateLayout`).
    """

    component: ComponentType
    shape: Any
    window_tokens: int | None = None
    """How many tokens a token attends to, itself included: what the swa pool must keep of a
    sequence; None for a layer of another component."""


class Model(ABC):
    """A causal language model as pure functions over a params pytree. Holds no array itself."""

    vocab_size: int
    """Tokens in the vocabulary = width of the logits."""
    max_context_len: int
    """Positions the model was made for, in tokens."""
    layer_caches: tuple[LayerCache, ...]
    """One per layer, in layer order."""

    @property
    def paged_components(self) -> tuple[ComponentType, ...]:
        """The components whose pools hold something of every token: the keys of `places`."""
        kinds = {cache.component for cache in self.layer_caches}
        return tuple(sorted(kinds - {ComponentType.RECURRENT}))

    @classmethod
    @abstractmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Model:
        """Reads a parsed config.json. Raises UnsupportedModelError naming what it cannot serve."""

    @abstractmethod
    def load_params(self, tensors: TensorReader, dtype: jnp.dtype) -> Params:
        """Builds the params from HF-named tensors, one at a time. Raises WeightsError kinds."""

    @abstractmethod
    def forward(
        self, params: Params, caches: Caches, inputs: StepInputs
    ) -> tuple[jax.Array, Caches]:
        """Writes the new tokens into `caches` and attends over them.

        Returns logits float32[R, vocab] of each row's *last* valid token (garbage in a padding
        row) and the caches, same structure, shapes and dtypes, so that the buffers can be donated.
        """


class TensorReader(ABC):
    """Named tensors of a checkpoint, read one at a time, each exactly once."""

    @abstractmethod
    def take(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The tensor under its HF name, as numpy float32 (the caller owns it).

        Raises MissingTensorError, or TensorShapeError when the stored shape is another one.
        """

    @abstractmethod
    def skip(self, name: str) -> None:
        """Declares a tensor known but unused, so that it is not reported as unexpected."""

    @abstractmethod
    def skip_under(self, prefix: str) -> None:
        """Declares all tensors of a module known but unused: a vision tower, an MTP layer."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
