"""What the recurrent kit compares, and what it says of a difference: where, and why if it can.

All of it runs on a `Bench`. Arrays are numpy's, copies; a failure is an AssertionError.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from uhrc_core.testing.compare import (
    Array,
    State,
    beyond,
    check_same_state,
    difference,
    row_of,
    same_bits,
)
from uhrc_core.testing.device import HOME, NUM_SLOTS, ROWS, Bench

#: With two, outputs show what the first token left in the state.
_PROBE_TOKENS = 2


def check_outputs(
    bench: Bench, actual: Array, expected: Array, lens: npt.ArrayLike, where: str
) -> None:
    """Outputs [ROWS, width, ...] up to ``lens[r]``; a failure names the first that is not close."""
    used = np.arange(bench.width) < np.asarray(lens, np.intp)[:, None]
    got, wanted = actual[used], expected[used]
    message = difference(got, wanted, bench.tolerance)
    if message is None:
        return
    wrong = beyond(got, wanted, bench.tolerance).reshape(len(got), -1).any(axis=1)
    row, token = min(np.argwhere(used)[wrong].tolist(), key=lambda at: (at[1], at[0]))
    chunk = bench.chunk
    starts_chunk = chunk > 1 and token > 0 and token % chunk == 0
    hint = f", where a chunk of {chunk} begins" if starts_chunk else ""
    raise AssertionError(
        f"{where}: outputs: {message}; the first is token {token} of row {row}{hint}"
    )


def check_state(bench: Bench, state: State, lens: npt.ArrayLike, where: str) -> None:
    """``state[r]`` against that after ``lens[r]`` steps; says so if a buffer is of other steps."""
    steps = bench.by_step.states
    for row, n in enumerate(np.asarray(lens).tolist()):
        for at, name in enumerate(bench.names):
            after = [each[at][row] for each in steps]
            message = difference(state[at][row], after[n], bench.tolerance)
            if message is not None:
                raise AssertionError(
                    f"{where}, row {row}: state after {n} tokens, buffer {name!r}: {message}"
                    f"{_whose(state[at][row], after, n, bench.tolerance)}"
                )


def _whose(mine: Array, after: list[Array], n: int, tolerance: float) -> str:
    """If a buffer is what it should be after another number of tokens than n, a word on that."""
    for m in sorted(range(len(after)), key=lambda m: abs(m - n)):
        if difference(mine, after[m], tolerance) is None:
            if abs(m - n) == 1:
                reason = ": off by one"
            elif m == 0:
                reason = ": the initial state, not updated"
            elif m == len(after) - 1:
                reason = ": lens is not looked at"
            else:
                reason = ""
            return f"; it is the state after {m} tokens{reason}"
    return ""


def check_initial_state(bench: Bench) -> None:
    """Each buffer's initial state matters to prefill in all that it matters in to step.

    One buffer at a time is replaced, all others stay; what then changes in the outputs and final
    states of two steps must change in those of a prefill, and outputs the other way round too.
    """
    # Ones, not zeros: a prefill that loses a buffer has left zeros there.
    stepped, prefilled = _by_step(bench, bench.warm), _by_prefill(bench, bench.warm)
    for at, name in enumerate(bench.names):
        other = tuple(np.ones_like(x) if i == at else x for i, x in enumerate(bench.warm))
        runs = {
            "prefill": (prefilled, _by_prefill(bench, other)),
            "step": (stepped, _by_step(bench, other)),
        }
        for row in range(ROWS):
            where = f"{bench.dtype}: {{}} forgets the initial state, buffer {name!r} (row {row})"
            _check_effects(bench, {n: _rows(run, row) for n, run in runs.items()}, where)


def _check_effects(bench: Bench, runs: dict[str, tuple[State, State]], where: str) -> None:
    """Outputs and final states of one row, before and after the initial state was replaced."""
    parts = ["outputs", *(f"final {name!r}" for name in bench.names)]
    for name, (before, after) in runs.items():
        if all(map(same_bits, before, after)):
            raise AssertionError(f"{where.format(name)}: with another one, nothing changes")
    for deaf, other, judged in (("prefill", "step", parts), ("step", "prefill", parts[:1])):
        for at, part in enumerate(judged):
            x, y = (run[at] for run in runs[other])
            heard = difference(y, x, bench.tolerance) is not None
            if heard and same_bits(*(run[at] for run in runs[deaf])):
                raise AssertionError(
                    f"{where.format(deaf)}: with another one, {other} gives other {part} in "
                    f"{_PROBE_TOKENS} tokens, and {deaf} the same"
                )


def _by_step(bench: Bench, state: State) -> State:
    """Outputs, then final states."""
    run = bench.walk(bench.inputs, state, _PROBE_TOKENS)
    return (run.out, *run.states[-1])


def _by_prefill(bench: Bench, state: State) -> State:
    out, final = bench.prefill(bench.inputs, state, [_PROBE_TOKENS] * ROWS)
    return (out[:, :_PROBE_TOKENS], *final)


def _rows(run: tuple[State, State], row: int) -> tuple[State, State]:
    return row_of(run[0], row), row_of(run[1], row)


# -- slots that nobody may touch -------------------------------------------------------------------


def plant_canaries(bench: Bench) -> State:
    """Warm states in slots 0 and 1, a pattern in slot 2, NaNs in the others; all as stored."""
    bench.poison()
    bench.write(HOME, bench.warm)
    pattern = np.array([-0.0, np.inf, np.nan, 3.0])
    canary = tuple(np.resize(pattern.astype(x.dtype), (1, *x.shape[1:])) for x in bench.warm)
    bench.write([2], canary)
    return bench.read(np.arange(NUM_SLOTS))


def check_untouched(bench: Bench, before: State, slots: range, where: str) -> None:
    """These slots are as they were ``before``."""
    after = bench.read(np.arange(NUM_SLOTS))
    for slot in slots:
        mine, wanted = row_of(after, slot), row_of(before, slot)
        check_same_state(mine, wanted, bench.names, f"{where} (slot {slot})")
