"""Hybrid checkpoints over real pools, for the tests of models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.oracle import hybrid
from uhrc_core.kinds import ComponentType
from uhrc_engine.models.contract import StepRow, make_step_inputs
from uhrc_engine.runner import Buckets, Runner
from uhrc_engine.weights import Pretrained, load_pretrained
from uhrc_full.layout import lay_out as lay_out_full
from uhrc_full.pool import KVPool
from uhrc_recurrent.layout import lay_out as lay_out_recurrent
from uhrc_recurrent.pool import RecurrentStatePool

FULL, RECURRENT = ComponentType.FULL, ComponentType.RECURRENT
PAGE_SIZE, MAX_PAGES, POOL_TOKENS, SLOTS = 16, 20, 1024, 8


def load(folder: Path, config: hybrid.Config, dtype: Any = jnp.float32) -> Pretrained:
    """One of the tiny models of tests/oracle/hybrid.py, through files in `folder`."""
    return load_pretrained(hybrid.write_checkpoint(folder, config, hybrid.tensors(config)), dtype)


class Sequencer:
    """A runner whose steps are said in tokens, sequences and slots."""

    def __init__(
        self, loaded: Pretrained, buckets: Buckets | None = None, dtype: str = "float32"
    ) -> None:
        shapes = {
            kind: [c.shape for c in loaded.model.layer_caches if c.component is kind]
            for kind in (FULL, RECURRENT)
        }
        self.full = KVPool(
            lay_out_full(shapes[FULL], page_size=PAGE_SIZE, num_tokens=POOL_TOKENS, dtype=dtype)
        )
        self.states = RecurrentStatePool(
            lay_out_recurrent(shapes[RECURRENT], num_slots=SLOTS, model_dtype=dtype)
        )
        pools = {FULL: self.full, RECURRENT: self.states}
        self.runner = Runner(loaded.model, loaded.params, pools, buckets, max_pages=MAX_PAGES)

    def row(
        self, ids: np.ndarray, start: int, sequence: int, slot: int, track: int | None = None
    ) -> StepRow:
        """`ids` from position `start` on, in the pages of `sequence` (0 to 2)."""
        pages = np.arange(POOL_TOKENS // PAGE_SIZE)[sequence * MAX_PAGES :][:MAX_PAGES]
        pages = np.random.default_rng(sequence).permutation(pages)
        return StepRow(ids, start, {FULL: pages}, state_slot=slot, track_slot=track)

    def step(self, rows: Sequence[StepRow], width: int) -> np.ndarray:
        """float32[rows, vocab]."""
        inputs = make_step_inputs(rows, width=width, max_pages=MAX_PAGES, page_size=PAGE_SIZE)
        return np.asarray(self.runner.step(inputs))[: len(rows)]

    def feed(
        self, ids: np.ndarray, cuts: Sequence[int], width: int, sequence: int = 0, slot: int = 0
    ) -> np.ndarray:
        """Logits float32[chunks, vocab] after each chunk [cuts[i], cuts[i + 1]) of ids."""
        return np.concatenate(
            [
                self.step([self.row(ids[start:end], start, sequence, slot)], width)
                for start, end in pairwise(cuts)
            ]
        )
