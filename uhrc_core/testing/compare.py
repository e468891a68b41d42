"""Comparing batches of outputs and states, and choosing rows of them. numpy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
#: One array [rows, ...] per buffer of the layout: temporal, then each conv.
State = tuple[Array, ...]


def check_same_bits(actual: Array, expected: Array, where: str) -> None:
    """Raise AssertionError unless shape, dtype and every bit agree (NaNs included)."""
    got, wanted = (np.ascontiguousarray(x) for x in (actual, expected))
    same = got.shape == wanted.shape and got.dtype == wanted.dtype
    if same and got.tobytes() == wanted.tobytes():
        return
    distance = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
    worst = float(np.max(distance, initial=0, where=np.isfinite(distance)))
    raise AssertionError(f"{where}: not the same bits; finite values differ by up to {worst:.3g}")


def check_same_state(actual: State, expected: State, names: list[str], where: str) -> None:
    """`check_same_bits` of every buffer, which a failure names."""
    for name, got, wanted in zip(names, actual, expected, strict=True):
        check_same_bits(got, wanted, f"{where}: state buffer {name!r}")


def difference(actual: Array, expected: Array, tolerance: float) -> str | None:
    """What is wrong with ``actual``; ``None``: within ``tolerance`` of the largest value."""
    got, wanted = (x.astype(np.float64) for x in (actual, expected))
    if not np.isfinite(got).all():
        return "values that are not finite"
    limit = tolerance * max(1.0, float(np.abs(wanted).max(initial=0)))
    worst = float(np.abs(got - wanted).max(initial=0))
    return None if worst <= limit else f"differ by {worst:.3g}, allowed is {limit:.3g}"


def row_of(state: State, row: int) -> State:
    """[1, ...] each."""
    return tuple(x[row : row + 1] for x in state)


def choose(flags: Array, x: Array, y: Array) -> Array:
    """``x`` where ``flags`` (bool, of the leading axes) is set, else ``y``."""
    return np.where(flags.reshape(*flags.shape, *(1,) * (x.ndim - flags.ndim)), x, y)


def nan_like(x: Array) -> Array:
    """NaNs; integers stay as they are, since they may be indices."""
    return x if np.issubdtype(x.dtype, np.integer) else np.full_like(x, np.nan)
