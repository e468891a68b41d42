"""Where a prefill is cut into chunks: on one grid of positions, with and without a hit.

A chunk ends at the first of: the next multiple of the chunk size, the next boundary, the end of the
prompt. Since the multiples count from token 0 and not from the end of the hit, a run that starts
from a cached prefix computes its tokens in the same chunks as a run from scratch, and so gets the
same bits. A boundary is a place where a forward must end for another reason.
"""

from __future__ import annotations

from collections.abc import Iterable

from uhrc_core.errors import InvalidParamsError


def next_chunk_end(start: int, stop: int, chunk_size: int, boundaries: Iterable[int] = ()) -> int:
    """Where the chunk that begins at token ``start`` ends.

    Args:
        start: tokens computed already, ``>= 0``.
        stop: tokens to compute in all, ``> start``.
        chunk_size: distance between two cuts of the grid, ``>= 1``.
        boundaries: positions that no chunk may cross, in any order; those outside
            ``(start, stop)`` do not matter.

    Returns:
        The end, in ``(start, min(stop, start + chunk_size)]``.

    Raises:
        InvalidParamsError: there is nothing to compute, or the chunk size is not positive.
    """
    if chunk_size < 1:
        raise InvalidParamsError(f"chunk_size: {chunk_size} must be >= 1")
    if not 0 <= start < stop:
        raise InvalidParamsError(f"chunk: start {start} must be in [0, stop {stop})")
    on_grid = (start // chunk_size + 1) * chunk_size
    return min(stop, on_grid, *(b for b in boundaries if b > start))
