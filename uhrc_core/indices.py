"""Pool indices: the type of their arrays, how a caller's are converted, numbers of whole pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from uhrc_core.errors import InvalidIndexError

IndexArray = npt.NDArray[np.int32]


def page_floor(num_tokens: int, page_size: int) -> int:
    """Tokens in the whole pages that ``num_tokens`` fill."""
    return num_tokens - num_tokens % page_size


def page_ceil(num_tokens: int, page_size: int) -> int:
    """Tokens in the whole pages that ``num_tokens`` need."""
    return -(-num_tokens // page_size) * page_size


def index_array(value: Any) -> IndexArray:
    """int32[n] of pool indices; lists and other integer arrays are converted.

    Raises:
        InvalidIndexError: another shape or dtype, or indices that do not fit int32.
    """
    array = np.asarray(value)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidIndexError(
            f"indices: need integers of shape [n], got dtype {array.dtype}, "
            f"shape {list(array.shape)}"
        )
    if array.size and (int(array.min()) < 0 or int(array.max()) > np.iinfo(np.int32).max):
        raise InvalidIndexError(f"indices: {int(array.min())}..{int(array.max())} exceed int32")
    return array.astype(np.int32, copy=False)
