"""Arguments checked at the boundary: a wrong type is refused by name before anything changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from uhrc_core.errors import InvalidIndexError, InvalidParamsError
from uhrc_core.node import IndexArray


def integer(name: str, value: Any) -> int:
    """``value`` as an int; numpy integers count as integers, bools and floats do not.

    Raises:
        InvalidParamsError: naming the argument and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidParamsError(f"{name}: {value!r} must be an integer")
    return int(value)  # pyright: ignore[reportUnknownArgumentType] (numpy's width is unknown)


def count(name: str, value: Any) -> int:
    """``value`` as an int ``>= 0``; raises as `integer`."""
    number = integer(name, value)
    if number < 0:
        raise InvalidParamsError(f"{name}: {value!r} must be an integer >= 0")
    return number


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
