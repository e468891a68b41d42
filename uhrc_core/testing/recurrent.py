"""RecurrentBackendConformance: what every recurrent backend must do, as a test class to inherit.

```python
class TestLeaky(RecurrentBackendConformance):
    spec = LEAKY
    params = LeakyParams(num_heads=2, head_dim=4)
    hf_configs = ({"model_type": "leaky", "num_hidden_layers": 2, ...},)

    def random_inputs(self, rng, rows, width): ...
    def prefill(self, inputs, state, lens): ...
    def step(self, inputs, state): ...
```

The checks run those functions around the pool of the installed ``uhrc-recurrent``, as an engine
does. They need jax and no pytest of their own: each ``test_*`` method raises AssertionError.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from uhrc_core.recurrent import MODEL_DTYPE
from uhrc_core.testing.compare import (
    Array,
    State,
    check_same_bits,
    check_same_state,
    choose,
    difference,
    nan_like,
    row_of,
)
from uhrc_core.testing.declarations import RecurrentDeclarationConformance
from uhrc_core.testing.device import (
    HOME,
    NO_SLOT,
    NUM_SLOTS,
    ROWS,
    SPARE,
    Bench,
    check_declared,
    recurrent_pool,
)


class RecurrentBackendConformance(RecurrentDeclarationConformance):
    """Inherit, fill in the attributes and the three functions, and pytest runs every check.

    Attributes:
        spec, params, hf_configs: of `RecurrentDeclarationConformance`; keep ``params`` small.
        output_dtype: of the outputs; `MODEL_DTYPE` for the model's.
        model_dtypes: what the model may run in; inputs and `MODEL_DTYPE` buffers come in it.
        tolerances: per model dtype, how far two ways to compute the same may differ, relative to
            the largest value.
    """

    output_dtype: str = "float32"
    model_dtypes: Sequence[str] = ("float32", "bfloat16")
    tolerances: ClassVar[Mapping[str, float]] = {
        "float32": 2e-5,
        "bfloat16": 2e-2,
        "float16": 4e-3,
    }

    @abstractmethod
    def random_inputs(self, rng: np.random.Generator, rows: int, width: int) -> Any:
        """What your kernels take beside state and lengths, for ``width`` tokens of each row.

        An array, or a pytree of arrays, [rows, width, ...] in float32; floats reach your functions
        in the model's dtype. Weights are yours: the same at every call.
        """

    @abstractmethod
    def prefill(self, inputs: Any, state: Any, lens: Any) -> tuple[Any, Any]:
        """The first ``lens[r]`` tokens of each row: jax arrays, traced under `jax.jit`.

        Args:
            inputs: as `random_inputs`, [R, W, ...]; anything may stand beyond ``lens[r]``.
            state: of the pool, ``state.temporal`` [R, ...] and ``state.convs``, a tuple, shapes
                and dtypes as ``spec.state_layout`` says. A fresh sequence has zeros.
            lens: int32[R], 0 <= lens <= W. A row of 0 tokens keeps its state bit for bit.

        Returns:
            Outputs [R, W, ...] (what lies beyond ``lens`` is not looked at) and the final states,
            ``(temporal, convs)`` or ``state._replace(...)``.
        """

    @abstractmethod
    def step(self, inputs: Any, state: Any) -> tuple[Any, Any]:
        """One token of each row: inputs [R, ...]; returns outputs [R, ...] and the new states."""

    def make_pool(self, num_slots: int, dtype: str) -> Any:
        """A pool for one layer; that of the installed ``uhrc-recurrent``, if not overridden."""
        return recurrent_pool(self.spec, self.params, num_slots, dtype)

    # -- memory --------------------------------------------------------------------------------

    def test_declared_bytes_are_those_of_the_pool(self) -> None:
        """`StateLayout.bytes_per_slot`, the pool's arrays and what the kernels return agree."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            declared = bench.layout.bytes_per_slot(dtype)
            for _, returned in bench.shapes.values():
                check_declared(returned, bench.declared())
            assert declared == bench.pool_bytes_per_slot, (
                f"{dtype}: state_layout declares {declared} bytes a slot, the pool takes "
                f"{bench.pool_bytes_per_slot}"
            )

    def test_outputs_and_states_have_the_declared_dtypes(self) -> None:
        """In each model dtype: nothing is widened or narrowed on the way."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            expected = dtype if self.output_dtype == MODEL_DTYPE else self.output_dtype
            for name, (out, state) in bench.shapes.items():
                assert out.dtype == expected, (
                    f"model dtype {dtype}: {name} returns outputs in {out.dtype}, output_dtype "
                    f"says {expected}"
                )
                check_declared(state, bench.declared())
            prefill, step = (bench.shapes[name][0].shape for name in ("prefill", "step"))
            assert prefill == (ROWS, bench.width, *step[1:]), (
                f"prefill returns outputs {list(prefill)} for [{ROWS}, {bench.width}] tokens, step "
                f"{list(step)} for [{ROWS}]"
            )

    # -- the same sequence in other pieces -----------------------------------------------------

    def test_decoding_token_by_token_equals_a_prefill(self) -> None:
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            out, state = bench.whole
            where = f"{dtype}: prefill of {bench.width} tokens against as many steps"
            self._check_close(dtype, out, bench.by_step.out, where)
            self._check_state(dtype, state, [bench.width] * ROWS, where)

    def test_a_prefill_cut_anywhere_equals_the_whole(self) -> None:
        """At every residue of the kernel's chunk, and at its multiples."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            multiples = range(2 * bench.chunk, bench.width, bench.chunk)
            cuts = [*range(1, bench.chunk + 1), *multiples]
            for first in range(0, len(cuts), ROWS):
                lens = np.resize(cuts[first : first + ROWS], ROWS)
                self._check_cut(dtype, bench, lens)

    def _check_cut(self, dtype: str, bench: Bench, lens: npt.NDArray[np.intp]) -> None:
        where = f"{dtype}: prefill cut at {lens.tolist()}"
        out, middle = bench.prefill(bench.inputs, bench.warm, lens)
        self._check_state(dtype, middle, lens, where)
        rest, final = bench.prefill(bench.window(bench.inputs, lens), middle, bench.width - lens)
        for row, n in enumerate(lens):
            joined = np.concatenate([out[row, :n], rest[row, : bench.width - n]])
            self._check_close(dtype, joined, bench.whole[0][row], f"{where}, row {row}")
        self._check_state(dtype, final, [bench.width] * ROWS, where)

    def test_cuts_at_multiples_of_the_kernel_chunk_give_the_same_bits(self) -> None:
        """``spec.kernel_chunk`` promises it, for a step of any width."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            out, final = bench.whole
            for cut in range(bench.chunk, bench.width, bench.chunk):
                where = f"{dtype}: cut at {cut}, kernel_chunk {bench.chunk}"
                first, middle = bench.prefill(bench.inputs, bench.warm, [cut] * ROWS)
                piece = bench.window(bench.inputs, [cut] * ROWS)
                rest, end = bench.prefill(piece, middle, [bench.width - cut] * ROWS)
                check_same_bits(first[:, :cut], out[:, :cut], f"{where}: outputs before it")
                check_same_bits(
                    rest[:, : bench.width - cut], out[:, cut:], f"{where}: outputs after it"
                )
                self._check_same_state(end, final, where)
        self._check_width_does_not_matter(self._bench(self.model_dtypes[0]))

    def _check_width_does_not_matter(self, bench: Bench) -> None:
        width = -(-bench.width // 2)
        lens = [bench.chunk] * ROWS
        narrow = bench.window(bench.inputs, [0] * ROWS, width)
        out, state = bench.prefill(narrow, bench.warm, lens)
        expected_out, expected = bench.prefill(bench.inputs, bench.warm, lens)
        where = f"a chunk in a step of {width} tokens, and in one of {bench.width}"
        check_same_bits(out[:, : bench.chunk], expected_out[:, : bench.chunk], f"{where}: outputs")
        self._check_same_state(state, expected, where)

    def test_the_initial_state_is_used(self) -> None:
        """A continued sequence and a fresh one with the same tokens differ."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            fresh, _ = bench.prefill(bench.inputs, bench.zeros, [bench.width] * ROWS)
            fresh_step, _ = bench.step(bench.token(bench.inputs, 0), bench.zeros)
            by_step = bench.by_step.out[:, 0]
            for row in range(ROWS):
                assert not np.array_equal(fresh[row], bench.whole[0][row]), (
                    f"{dtype}: prefill forgets the initial state: row {row} gives what a fresh "
                    "sequence gives"
                )
                assert not np.array_equal(fresh_step[row], by_step[row]), (
                    f"{dtype}: step forgets the initial state: row {row} gives what a fresh "
                    "sequence gives"
                )

    def test_identical_tokens(self) -> None:
        """Correlated keys, on which the inverse inside a chunked kernel can blow up."""
        dtype = self.model_dtypes[0]
        bench = self._bench(dtype)
        inputs = bench.map(lambda x: np.repeat(x[:, :1], bench.width, axis=1), bench.inputs)
        out, state = bench.prefill(inputs, bench.warm, [bench.width] * ROWS)
        expected = bench.walk(inputs, bench.warm)
        where = f"{dtype}: {bench.width} identical tokens, prefill against steps"
        self._check_close(dtype, out, expected.out, where)
        for name, got, wanted in zip(bench.names, state, expected.states[-1], strict=True):
            self._check_close(dtype, got, wanted, f"{where}: state buffer {name!r}")

    # -- clones --------------------------------------------------------------------------------

    def test_a_clone_is_the_whole_state_and_goes_on_like_its_source(self) -> None:
        """Through the pool's ``copy_slots``: what a prefix hit does before its first forward."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            bench.poison()
            bench.write(HOME, bench.warm)
            bench.pool.copy_slots(HOME, SPARE)
            self._check_same_state(bench.read(SPARE), bench.warm, f"{dtype}: clone not complete")
            out = bench.prefill_slots(bench.inputs, HOME, [bench.width] * ROWS)
            self._check_same_state(
                bench.read(SPARE), bench.warm, f"{dtype}: its source went on and changed the clone"
            )
            clone_out = bench.prefill_slots(bench.inputs, SPARE, [bench.width] * ROWS)
            check_same_bits(clone_out, out, f"{dtype}: a clone continued: outputs")
            self._check_same_state(
                bench.read(SPARE), bench.read(HOME), f"{dtype}: a clone continued"
            )

    # -- batches -------------------------------------------------------------------------------

    def test_rows_of_different_lengths(self) -> None:
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            lens = np.array([bench.width, 1, bench.chunk, bench.width - 1])
            out, state = bench.prefill(bench.inputs, bench.warm, lens)
            where = f"{dtype}: rows of {lens.tolist()} tokens"
            for row, n in enumerate(lens):
                expected = bench.by_step.out[row, :n]
                self._check_close(dtype, out[row, :n], expected, f"{where}, row {row}")
            self._check_state(dtype, state, lens, where)

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        """The same bits whatever its neighbours' tokens, states and lengths are."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            others = bench.random(3)
            for row in range(ROWS):
                mine = np.arange(ROWS) == row
                inputs = bench.choose(mine, bench.inputs, others)
                state = tuple(
                    choose(mine, x, y) for x, y in zip(bench.warm, bench.zeros, strict=True)
                )
                lens = np.where(mine, bench.width, 1)
                out, final = bench.prefill(inputs, state, lens)
                where = f"{dtype}: row {row} looks at its neighbours"
                check_same_bits(out[row], bench.whole[0][row], f"{where}: prefill outputs")
                self._check_same_state(row_of(final, row), row_of(bench.whole[1], row), where)
                out, final = bench.step(bench.token(inputs, 0), state)
                expected = bench.by_step
                check_same_bits(out[row], expected.out[row, 0], f"{where}: step outputs")
                self._check_same_state(row_of(final, row), row_of(expected.states[1], row), where)

    def test_padding_is_neither_read_nor_written(self) -> None:
        """NaNs at every padded token, in every slot nobody runs in, and canaries in idle rows.

        Row 0 has tokens, row 1 has all, row 2 has none, row 3 is padding without a slot.
        """
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            lens = np.array([bench.chunk, bench.width, 0, 0])
            slots = np.array([0, 1, 2, NO_SLOT])
            expected = bench.prefill(bench.inputs, bench.warm, lens)
            before = self._plant_canaries(bench)
            used = np.arange(bench.width) < lens[:, None]
            poisoned = bench.choose(used, bench.inputs, bench.map(nan_like, bench.inputs))
            out = bench.prefill_slots(poisoned, slots, lens)
            for row in (0, 1):
                where = f"{dtype}: prefill reads padding, row {row}"
                n = lens[row]
                check_same_bits(out[row, :n], expected[0][row, :n], f"{where}: outputs")
                self._check_same_state(bench.read([row]), row_of(expected[1], row), where)
            self._check_untouched(bench, before, f"{dtype}: prefill wrote to a padding row's slot")
            before = self._plant_canaries(bench)
            first = bench.token(bench.inputs, 0)
            poisoned = bench.choose(np.arange(ROWS) < 2, first, bench.map(nan_like, first))
            bench.step_slots(poisoned, [0, 1, NO_SLOT, NO_SLOT])
            for row in (0, 1):
                where = f"{dtype}: step reads padding, row {row}"
                expected_state = row_of(bench.by_step.states[1], row)
                self._check_same_state(bench.read([row]), expected_state, where)
            self._check_untouched(bench, before, f"{dtype}: step wrote to a padding row's slot")

    def _plant_canaries(self, bench: Bench) -> State:
        """Warm states in slots 0 and 1, a pattern in slot 2, NaNs in the others; all as stored."""
        bench.poison()
        bench.write(HOME, bench.warm)
        pattern = np.array([-0.0, np.inf, np.nan, 3.0])
        canary = tuple(np.resize(pattern.astype(x.dtype), (1, *x.shape[1:])) for x in bench.warm)
        bench.write([2], canary)
        return bench.read(np.arange(NUM_SLOTS))

    def _check_untouched(self, bench: Bench, before: State, where: str) -> None:
        after = bench.read(np.arange(NUM_SLOTS))
        for slot in range(2, NUM_SLOTS):
            self._check_same_state(
                row_of(after, slot), row_of(before, slot), f"{where} (slot {slot})"
            )

    # -- comparing -----------------------------------------------------------------------------

    def _bench(self, dtype: str) -> Bench:
        return _bench_of(type(self), dtype)

    def _check_close(self, dtype: str, actual: Array, expected: Array, where: str) -> None:
        message = difference(actual, expected, self.tolerances[dtype])
        assert message is None, f"{where}: {message}"

    def _check_state(self, dtype: str, state: State, lens: Any, where: str) -> None:
        """``state[r]`` against that after ``lens[r]`` steps; says so if it is a neighbour's."""
        bench = self._bench(dtype)
        states = bench.by_step.states
        for row, n in enumerate(int(each) for each in lens):
            mine = row_of(state, row)
            for at, name in enumerate(bench.names):
                expected = row_of(states[n], row)[at]
                message = difference(mine[at], expected, self.tolerances[dtype])
                if message is None:
                    continue
                near = [m for m in (n - 1, n + 1) if 0 <= m < len(states)]
                off = [m for m in near if self._equals(dtype, mine, row_of(states[m], row))]
                hint = f"; it is the state after {off[0]} tokens: off by one" if off else ""
                raise AssertionError(
                    f"{where}, row {row}: state after {n} tokens, buffer {name!r}: {message}{hint}"
                )

    def _equals(self, dtype: str, state: State, expected: State) -> bool:
        pairs = zip(state, expected, strict=True)
        return all(difference(x, y, self.tolerances[dtype]) is None for x, y in pairs)

    def _check_same_state(self, actual: State, expected: State, where: str) -> None:
        names = [buffer.name for buffer in self.spec.state_layout(self.params).buffers]
        check_same_state(actual, expected, names, where)


@cache
def _bench_of(suite: type[RecurrentBackendConformance], dtype: str) -> Bench:
    """One a suite and dtype, so that its checks share what is compiled."""
    return Bench(suite(), dtype)
