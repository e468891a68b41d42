"""Comparing batches of outputs and states, and choosing rows of them. numpy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
#: One array [rows, ...] per buffer of the layout: temporal, then each conv.
State = tuple[Array, ...]


def same_bits(actual: Array, expected: Array) -> bool:
    """Whether shape, dtype and every bit agree (NaNs included)."""
    got, wanted = (np.ascontiguousarray(x) for x in (actual, expected))
    same = got.shape == wanted.shape and got.dtype == wanted.dtype
    return same and got.tobytes() == wanted.tobytes()


def check_same_bits(actual: Array, expected: Array, where: str) -> None:
    """Raise AssertionError unless `same_bits`; says what was found instead."""
    if same_bits(actual, expected):
        return
    raise AssertionError(f"{where}: not the same bits: {_other_bits(actual, expected)}")


def check_same_state(actual: State, expected: State, names: list[str], where: str) -> None:
    """`check_same_bits` of every buffer, which a failure names."""
    for name, got, wanted in zip(names, actual, expected, strict=True):
        check_same_bits(got, wanted, f"{where}: state buffer {name!r}")


def beyond(actual: Array, expected: Array, tolerance: float) -> npt.NDArray[np.bool_]:
    """Which values are further apart than ``tolerance`` of the largest, or not finite."""
    got, wanted = (x.astype(np.float64) for x in (actual, expected))
    with np.errstate(invalid="ignore"):
        return ~(np.abs(got - wanted) <= _limit(wanted, tolerance))


def difference(actual: Array, expected: Array, tolerance: float) -> str | None:
    """What is wrong with ``actual``; ``None`` where nothing is `beyond`."""
    if not beyond(actual, expected, tolerance).any():
        return None
    got, wanted = (x.astype(np.float64) for x in (actual, expected))
    if unlike := _unlike_numbers(got, wanted):
        return unlike
    if not np.isfinite(wanted).all():
        return "values that are not finite, in both"
    worst, limit = float(np.abs(got - wanted).max()), _limit(wanted, tolerance)
    return f"differ by {worst:.3g}, allowed is {limit:.3g}"


def row_of(state: State, row: int) -> State:
    """[1, ...] each."""
    return tuple(x[row : row + 1] for x in state)


def choose(flags: Array, x: Array, y: Array) -> Array:
    """``x`` where ``flags`` (bool, of the leading axes) is set, else ``y``."""
    return np.where(flags.reshape(*flags.shape, *(1,) * (x.ndim - flags.ndim)), x, y)


def nan_like(x: Array) -> Array:
    """NaNs; integers stay as they are, since they may be indices."""
    return x if np.issubdtype(x.dtype, np.integer) else np.full_like(x, np.nan)


def _limit(wanted: npt.NDArray[np.float64], tolerance: float) -> float:
    return tolerance * max(1.0, float(np.abs(wanted).max(initial=0)))


def _other_bits(actual: Array, expected: Array) -> str:
    """What differs in two arrays that are not `same_bits`."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        found, wanted = (f"{x.dtype}{list(x.shape)}" for x in (actual, expected))
        return f"{found}, not {wanted}"
    got, wanted = (x.astype(np.float64) for x in (actual, expected))
    if unlike := _unlike_numbers(got, wanted):
        return unlike
    if np.array_equal(got, wanted, equal_nan=True):
        return "the values are equal, but not the sign of a zero or the bits of a nan"
    finite = np.isfinite(wanted)
    return f"values differ by up to {np.abs(got[finite] - wanted[finite]).max(initial=0):.3g}"


def _unlike_numbers(got: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> str | None:
    """Where one has a number and the other a nan or an infinity, if anywhere."""
    for name, is_name in (("nan", np.isnan), ("inf", np.isinf)):
        for flags, found in (
            (is_name(got) & ~is_name(wanted), f"{name} where there was a number"),
            (is_name(wanted) & ~is_name(got), f"a number where there was {name}"),
        ):
            if flags.any():
                first = np.argwhere(flags)[0].tolist()
                return f"{found}, in {flags.sum()} of {flags.size} values, the first at {first}"
    return None
