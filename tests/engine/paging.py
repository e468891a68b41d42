"""Page tables from what tests think in, a pool index for each token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from uhrc_core.kinds import ComponentType


def page_tables(
    indices: Mapping[ComponentType, np.ndarray], page_size: int
) -> dict[ComponentType, np.ndarray]:
    """Of sequences whose tokens fill pages in order; a page is gone when its last token is."""

    def pages(tokens: np.ndarray) -> np.ndarray:
        tokens = np.asarray(tokens)
        lasts = np.minimum(np.arange(page_size, len(tokens) + page_size, page_size), len(tokens))
        last = tokens[lasts - 1]
        return np.where(last < 0, -1, last // page_size).astype(np.int32)

    return {kind: pages(tokens) for kind, tokens in indices.items()}


def token_indices(pages: np.ndarray, stop: int, page_size: int) -> np.ndarray:
    """int32[stop]: the inverse, -1 for a token of a page that is gone."""
    pages = np.asarray(pages)[:, None]
    spread = np.where(pages < 0, -1, pages * page_size + np.arange(page_size))
    return spread.reshape(-1)[:stop]
