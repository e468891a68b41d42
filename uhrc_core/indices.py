"""Arrays of pool indices: their type, and how a caller's are converted."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from uhrc_core.errors import InvalidIndexError

IndexArray = npt.NDArray[np.int32]


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
