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
does. They need jax and no pytest of their own: each ``test_*`` method raises AssertionError. They
stand in the order in which to read their failures: those that can tell a cause come first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from uhrc_core.registry.recurrent import MODEL_DTYPE
from uhrc_core.testing.compare import (
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
from uhrc_core.testing.recurrent_checks import (
    check_initial_state,
    check_outputs,
    check_state,
    check_untouched,
    plant_canaries,
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

    # -- what is returned ----------------------------------------------------------------------

    def test_outputs_and_states_have_the_declared_shapes_and_dtypes(self) -> None:
        """In each model dtype: nothing is left out, widened or narrowed on the way."""
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

    def test_declared_bytes_are_those_of_the_pool(self) -> None:
        """`StateLayout.bytes_per_slot` and the pool's arrays agree."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            declared = bench.layout.bytes_per_slot(dtype)
            assert declared == bench.pool_bytes_per_slot, (
                f"{dtype}: state_layout declares {declared} bytes a slot, the pool takes "
                f"{bench.pool_bytes_per_slot}"
            )

    # -- which states, which rows --------------------------------------------------------------

    def test_the_initial_state_is_used(self) -> None:
        """All of it: each buffer, and so a continued sequence differs from a fresh one."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            check_initial_state(bench)
            fresh, _ = bench.prefill(bench.inputs, bench.zeros, [bench.width] * ROWS)
            for row in range(ROWS):
                assert not np.array_equal(fresh[row], bench.whole[0][row]), (
                    f"{dtype}: prefill forgets the initial state: row {row} gives what a fresh "
                    "sequence gives"
                )

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
                expected = row_of(bench.whole[1], row)
                check_same_state(row_of(final, row), expected, bench.names, where)
                out, final = bench.step(bench.token(inputs, 0), state)
                check_same_bits(out[row], bench.by_step.out[row, 0], f"{where}: step outputs")
                expected = row_of(bench.by_step.states[1], row)
                check_same_state(row_of(final, row), expected, bench.names, where)

    def test_rows_of_different_lengths(self) -> None:
        """Each ends in the state after its last token."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            lens = [bench.width, 1, bench.chunk, bench.width - 1]
            out, state = bench.prefill(bench.inputs, bench.warm, lens)
            where = f"{dtype}: rows of {lens} tokens, prefill against steps"
            check_state(bench, state, lens, where)
            check_outputs(bench, out, bench.by_step.out, lens, f"{where}: states are right")

    def test_padding_is_neither_read_nor_written(self) -> None:
        """NaNs at every padded token, in every slot nobody runs in, and canaries in idle rows.

        Row 0 has tokens, row 1 has all, row 2 has none, row 3 is padding without a slot.
        """
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            lens = np.array([bench.chunk, bench.width, 0, 0])
            expected = bench.prefill(bench.inputs, bench.warm, lens)
            before = plant_canaries(bench)
            used = np.arange(bench.width) < lens[:, None]
            poisoned = bench.choose(used, bench.inputs, bench.map(nan_like, bench.inputs))
            out = bench.prefill_slots(poisoned, [0, 1, 2, NO_SLOT], lens)
            for row in (0, 1):
                where = f"{dtype}: prefill reads padding, row {row}"
                n = lens[row]
                check_same_bits(out[row, :n], expected[0][row, :n], f"{where}: outputs")
                state = row_of(expected[1], row)
                check_same_state(bench.read([row]), state, bench.names, where)
            where = f"{dtype}: prefill changes the state of a row of 0 tokens"
            check_untouched(bench, before, range(2, 3), where)
            where = f"{dtype}: prefill changes a slot that no row has"
            check_untouched(bench, before, range(3, NUM_SLOTS), where)
            self._check_padding_of_a_step(bench)

    def _check_padding_of_a_step(self, bench: Bench) -> None:
        before = plant_canaries(bench)
        first = bench.token(bench.inputs, 0)
        poisoned = bench.choose(np.arange(ROWS) < 2, first, bench.map(nan_like, first))
        bench.step_slots(poisoned, [0, 1, NO_SLOT, NO_SLOT])
        for row in (0, 1):
            where = f"{bench.dtype}: step reads padding, row {row}"
            expected = row_of(bench.by_step.states[1], row)
            check_same_state(bench.read([row]), expected, bench.names, where)
        where = f"{bench.dtype}: step changes a slot that no row has"
        check_untouched(bench, before, range(2, NUM_SLOTS), where)

    # -- clones --------------------------------------------------------------------------------

    def test_a_clone_is_the_whole_state_and_goes_on_like_its_source(self) -> None:
        """Through the pool's ``copy_slots``: what a prefix hit does before its first forward."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            bench.poison()
            bench.write(HOME, bench.warm)
            bench.pool.copy_slots(HOME, SPARE)
            where = f"{dtype}: clone not complete"
            check_same_state(bench.read(SPARE), bench.warm, bench.names, where)
            out = bench.prefill_slots(bench.inputs, HOME, [bench.width] * ROWS)
            where = f"{dtype}: its source went on and changed the clone"
            check_same_state(bench.read(SPARE), bench.warm, bench.names, where)
            clone_out = bench.prefill_slots(bench.inputs, SPARE, [bench.width] * ROWS)
            where = f"{dtype}: a clone continued"
            check_same_bits(clone_out, out, f"{where}: outputs")
            check_same_state(bench.read(SPARE), bench.read(HOME), bench.names, where)

    # -- the same sequence in other pieces -----------------------------------------------------

    def test_decoding_token_by_token_equals_a_prefill(self) -> None:
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            out, state = bench.whole
            lens = [bench.width] * ROWS
            where = f"{dtype}: prefill of {bench.width} tokens against as many steps"
            check_state(bench, state, lens, where)
            check_outputs(bench, out, bench.by_step.out, lens, f"{where}: states are right")

    def test_identical_tokens(self) -> None:
        """Correlated keys, on which the inverse inside a chunked kernel can blow up."""
        bench = self._bench(self.model_dtypes[0])
        inputs = bench.map(lambda x: np.repeat(x[:, :1], bench.width, axis=1), bench.inputs)
        lens = [bench.width] * ROWS
        out, state = bench.prefill(inputs, bench.warm, lens)
        expected = bench.walk(inputs, bench.warm, bench.width)
        where = f"{bench.dtype}: {bench.width} identical tokens, prefill against steps"
        check_outputs(bench, out, expected.out, lens, where)
        for name, got, wanted in zip(bench.names, state, expected.states[-1], strict=True):
            message = difference(got, wanted, bench.tolerance)
            assert message is None, f"{where}: state buffer {name!r}: {message}"

    def test_a_prefill_cut_anywhere_equals_the_whole(self) -> None:
        """At every residue of the kernel's chunk, and at its multiples."""
        for dtype in self.model_dtypes:
            bench = self._bench(dtype)
            multiples = range(2 * bench.chunk, bench.width, bench.chunk)
            cuts = [*range(1, bench.chunk + 1), *multiples]
            for first in range(0, len(cuts), ROWS):
                self._check_cut(bench, np.resize(cuts[first : first + ROWS], ROWS))

    def _check_cut(self, bench: Bench, lens: npt.NDArray[np.intp]) -> None:
        where = f"{bench.dtype}: prefill cut at {lens.tolist()}"
        out, middle = bench.prefill(bench.inputs, bench.warm, lens)
        check_state(bench, middle, lens, f"{where}, before the cut")
        check_outputs(bench, out, bench.whole[0], lens, f"{where}, before it")
        left = bench.width - lens
        piece = bench.window(bench.inputs, lens)
        rest, final = bench.prefill(piece, middle, left)
        check_state(bench, final, [bench.width] * ROWS, f"{where}, at the end")
        expected = bench.window(bench.whole[0], lens)
        check_outputs(bench, rest, expected, left, f"{where}, counted from it")

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
                check_same_state(end, final, bench.names, where)
        self._check_width_does_not_matter(self._bench(self.model_dtypes[0]))

    def _check_width_does_not_matter(self, bench: Bench) -> None:
        width = -(-bench.width // 2)
        lens = [bench.chunk] * ROWS
        narrow = bench.window(bench.inputs, [0] * ROWS, width)
        out, state = bench.prefill(narrow, bench.warm, lens)
        expected_out, expected = bench.prefill(bench.inputs, bench.warm, lens)
        where = f"a chunk in a step of {width} tokens, and in one of {bench.width}"
        check_same_bits(out[:, : bench.chunk], expected_out[:, : bench.chunk], f"{where}: outputs")
        check_same_state(state, expected, bench.names, where)

    def _bench(self, dtype: str) -> Bench:
        return _bench_of(type(self), dtype)


@cache
def _bench_of(suite: type[RecurrentBackendConformance], dtype: str) -> Bench:
    """One a suite and dtype, so that its checks share what is compiled."""
    return Bench(suite(), dtype)
