"""Window models over real pools, for the tests of models: what leaves a window is poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.engine.paging import page_tables
from uhrc_core.kinds import ComponentType
from uhrc_engine.models.contract import StepRow, make_step_inputs
from uhrc_engine.runner import Buckets, Runner
from uhrc_engine.weights import Pretrained
from uhrc_full.layout import lay_out
from uhrc_full.pool import KVPool

FULL, SWA = ComponentType.FULL, ComponentType.SWA
POOL_TOKENS = 1024


class WindowSequencer:
    """A runner of one sequence at a time over two pools, in which all is NaN but what it may see.

    The sequence's pages are scattered in both pools, differently, and never page 0, which is where
    the page table points for a page that the window has left.
    """

    def __init__(
        self,
        loaded: Pretrained,
        buckets: Buckets,
        page_size: int,
        window: int,
        dtype: str = "float32",
    ) -> None:
        self.page_size, self.window = page_size, window
        self.pools: dict[ComponentType, Any] = {
            kind: KVPool(
                lay_out(
                    [c.shape for c in loaded.model.layer_caches if c.component is kind],
                    page_size=page_size,
                    num_tokens=POOL_TOKENS,
                    dtype=dtype,
                )
            )
            for kind in (FULL, SWA)
        }
        self.max_pages = POOL_TOKENS // 2 // page_size
        self.runner = Runner(
            loaded.model, loaded.params, self.pools, buckets, max_pages=self.max_pages
        )
        self.indices = {kind: self._scattered(seed) for seed, kind in enumerate((FULL, SWA))}

    def feed(self, ids: np.ndarray, cuts: Sequence[int], width: int) -> np.ndarray:
        """Logits float32[chunks, vocab] after each chunk [cuts[i], cuts[i + 1]) of ids."""
        logits: list[np.ndarray] = []
        for start, end in pairwise(cuts):
            first_seen = max(start + 1 - self.window, 0)
            self._poison(SWA, first_seen, start)
            self._poison(FULL, 0, start)
            swa = self.indices[SWA].copy()
            swa[:first_seen] = -1
            places = {FULL: self.indices[FULL], SWA: swa}
            own = {kind: places[kind] for kind in self.runner.model.paged_components}
            row = StepRow(ids[start:end], start, page_tables(own, self.page_size))
            inputs = make_step_inputs(
                [row], width=width, max_pages=self.max_pages, page_size=self.page_size
            )
            logits.append(np.asarray(self.runner.step(inputs))[0])
        return np.stack(logits)

    def _scattered(self, seed: int) -> np.ndarray:
        pages = np.random.default_rng(seed).permutation(np.arange(1, 2 * self.max_pages))
        pages = pages[: self.max_pages]
        indices = pages[:, None] * self.page_size + np.arange(self.page_size)
        return indices.ravel().astype(np.int32)

    def _poison(self, kind: ComponentType, first: int, stop: int) -> None:
        """NaN into every token of the pool but the sequence's `[first, stop)`."""
        is_kept = np.zeros(POOL_TOKENS, bool)
        is_kept[self.indices[kind][first:stop]] = True

        def poison(pages: jax.Array) -> jax.Array:
            kept = is_kept.reshape(-1, self.page_size, *[1] * (pages.ndim - 2))
            return jnp.where(kept, pages, jnp.nan)

        pool = self.pools[kind]
        pool.replace(jax.tree.map(poison, pool.buffers))
