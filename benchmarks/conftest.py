"""The table of ratios: each benchmark compares two things measured in one run, side by side.

A benchmark takes the `ratios` fixture and calls it with a name, the ratio it measured and the limit
it must keep; the table is printed at the end, and a ratio over its limit fails the benchmark. A
limit of infinity says that the ratio is only reported.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")


@dataclass(frozen=True)
class Row:
    name: str
    ratio: float
    limit: float


_ROWS: list[Row] = []

CheckRatio = Callable[[str, float, float], None]


@pytest.fixture
def ratios() -> CheckRatio:
    """``ratios(name, ratio, limit)``: record one line of the table and hold it to its limit."""

    def check(name: str, ratio: float, limit: float) -> None:
        _ROWS.append(Row(name, ratio, limit))
        assert ratio <= limit, f"{name}: {ratio:.2f} exceeds {limit:.2f}"

    return check


@pytest.fixture(scope="session")
def best_of() -> Callable[[Callable[[], object], int], float]:
    """``best_of(call, rounds)``: the least seconds of several calls; noise only ever adds."""

    def measure(call: Callable[[], object], rounds: int) -> float:
        best = float("inf")
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
        return best

    return measure


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _ROWS:
        return
    terminalreporter.section("ratios (measured in this run / limit)")
    width = max(len(row.name) for row in _ROWS)
    for row in _ROWS:
        limit = f"{row.limit:.2f}" if math.isfinite(row.limit) else "reported"
        terminalreporter.write_line(f"{row.name:{width}}  {row.ratio:8.2f} / {limit}")
