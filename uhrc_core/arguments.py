"""Arguments checked at the boundary: a wrong type is refused by name before anything changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from uhrc_core.errors import InvalidParamsError


def integer(name: str, value: Any) -> int:
    """``value`` as an int; numpy integers count as integers, bools and floats do not.

    Raises:
        InvalidParamsError: naming the argument and the value.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidParamsError(f"{name}: {value!r} must be an integer")
    return int(value)  # pyright: ignore[reportUnknownArgumentType] (numpy's width is unknown)


def count(name: str, value: Any) -> int:
    """``value`` as an int ``>= 0``; raises as `integer`."""
    number = integer(name, value)
    if number < 0:
        raise InvalidParamsError(f"{name}: {value!r} must be an integer >= 0")
    return number
