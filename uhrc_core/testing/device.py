"""What the recurrent kit runs on: an author's functions around the real pool of recurrent states.

Every run goes the way of an engine's step: states out of their slots, the author's function, final
states back into their slots, in one jitted call that donates the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from uhrc_core.cache.eviction import LRU
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.catalog import installed_plugins
from uhrc_core.registry.plan import LayerKind
from uhrc_core.registry.recurrent import MODEL_DTYPE, RecurrentBackendSpec
from uhrc_core.registry.specs import ComponentContext
from uhrc_core.registry.tables import ConfigTable
from uhrc_core.testing.compare import Array, State, choose

ROWS = 4
NO_SLOT = -1
#: Rows' own slots, as many to clone into, and some that nobody may touch.
HOME, SPARE = np.arange(ROWS), np.arange(ROWS, 2 * ROWS)
NUM_SLOTS = 3 * ROWS


class RecurrentFunctions(Protocol):
    """What `Bench` asks of a suite; `RecurrentBackendConformance` documents it."""

    spec: RecurrentBackendSpec
    params: ConfigTable
    tolerances: ClassVar[Mapping[str, float]]

    def random_inputs(self, rng: np.random.Generator, rows: int, width: int) -> Any: ...
    def prefill(self, inputs: Any, state: Any, lens: Any) -> tuple[Any, Any]: ...
    def step(self, inputs: Any, state: Any) -> tuple[Any, Any]: ...
    def make_pool(self, num_slots: int, dtype: str) -> Any: ...


class Returned(NamedTuple):
    """Shape and dtype of one array that a function returns."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes_per_row(self) -> int:
        return prod(self.shape[1:]) * (2 if "16" in self.dtype else 4)


class Trajectory(NamedTuple):
    """What decoding token by token gives."""

    out: Array
    """[rows, n_tokens, ...]."""
    states: tuple[State, ...]
    """After 0, 1, ... n_tokens tokens."""


def recurrent_pool(
    spec: RecurrentBackendSpec, params: ConfigTable, num_slots: int, dtype: str
) -> Any:
    """The state pool that the installed component ``recurrent`` makes for one layer.

    Raises PluginError when no distribution brings it (``pip install uhrc-recurrent``).
    """
    component = installed_plugins({}).load(["recurrent"]).components["recurrent"]
    table = component.params_model.model_validate(
        {"backend": spec.name, "num_slots": num_slots, "dtype": dtype}
    )
    context = ComponentContext(1, 1, LRU(), component.eviction_priority, spec)
    layer = LayerKind(ComponentType.RECURRENT, params.model_dump(), spec.name)
    return component.make_device_pool(table, context, [layer])


class Bench:
    """One suite's functions in one model dtype, jitted, with a pool of `NUM_SLOTS` slots.

    All batches have `ROWS` rows of `width` tokens, so that each function is compiled once. Arrays
    that go in and come out are numpy's, copies; the pool's arrays are donated at every run.

    Attributes:
        dtype, tolerance: the model dtype, and the suite's tolerance in it.
        names: of the state's buffers, in the order of a `State`.
    """

    def __init__(self, suite: RecurrentFunctions, dtype: str) -> None:
        self._jax: Any = import_module("jax")
        self._suite = suite
        self.dtype = dtype
        self.tolerance = suite.tolerances[dtype]
        self.chunk = suite.spec.kernel_chunk
        # Two chunks, a part of a third, and enough tokens to cut where a chunk is one token.
        self.width = 2 * self.chunk + self.chunk // 2 + 5
        self.layout = suite.spec.state_layout(suite.params)
        self.names = [buffer.name for buffer in self.layout.buffers]
        self.pool = suite.make_pool(NUM_SLOTS, dtype)
        self._prefill = self._jax.jit(self._prefill_slots, donate_argnums=0)
        self._step = self._jax.jit(self._step_slots, donate_argnums=0)

    # -- runs on states ------------------------------------------------------------------------

    def prefill(self, inputs: Any, state: State, lens: npt.ArrayLike) -> tuple[Array, State]:
        """``lens[r]`` tokens of each row from ``state``: outputs [rows, width, ...], new states."""
        self.write(HOME, state)
        out = self.prefill_slots(inputs, HOME, lens)
        return out, self.read(HOME)

    def step(self, inputs: Any, state: State) -> tuple[Array, State]:
        """One token of each row, inputs [rows, ...]: outputs [rows, ...], new states."""
        self.write(HOME, state)
        out = self.step_slots(inputs, HOME)
        return out, self.read(HOME)

    def walk(self, inputs: Any, state: State, num_tokens: int) -> Trajectory:
        """The first tokens of ``inputs``, one `step` each."""
        outs: list[Array] = []
        states = [state]
        for at in range(num_tokens):
            out, state = self.step(self.token(inputs, at), state)
            outs.append(out)
            states.append(state)
        return Trajectory(np.stack(outs, axis=1), tuple(states))

    # -- runs on slots -------------------------------------------------------------------------

    def prefill_slots(self, inputs: Any, slots: npt.ArrayLike, lens: npt.ArrayLike) -> Array:
        """A prefill step from and into ``slots``; a row of `NO_SLOT` is padding."""
        at, used = np.asarray(slots, np.int32), np.asarray(lens, np.int32)
        out, buffers = self._prefill(self.pool.buffers, inputs, at, used)
        self.pool.replace(buffers)
        return np.asarray(out)

    def step_slots(self, inputs: Any, slots: npt.ArrayLike) -> Array:
        """A decode step from and into ``slots``."""
        out, buffers = self._step(self.pool.buffers, inputs, np.asarray(slots, np.int32))
        self.pool.replace(buffers)
        return np.asarray(out)

    def read(self, slots: npt.ArrayLike) -> State:
        (state,) = self.pool.read(slots)
        return (state.temporal, *state.convs)

    def write(self, slots: npt.ArrayLike, state: State) -> None:
        (like,) = self.pool.read(slots)
        self.pool.write(slots, (type(like)(state[0], tuple(state[1:])),))

    def poison(self) -> None:
        """Every value of every slot a NaN."""
        everything = np.arange(NUM_SLOTS)
        self.write(everything, tuple(np.full_like(x, np.nan) for x in self.read(everything)))

    # -- data ----------------------------------------------------------------------------------

    def random(self, seed: int) -> Any:
        """The author's random inputs [ROWS, width, ...], floats in the model's dtype."""
        rng = np.random.default_rng(seed)
        return self.map(self._cast, self._suite.random_inputs(rng, ROWS, self.width))

    def window(self, inputs: Any, starts: npt.ArrayLike, width: int | None = None) -> Any:
        """Tokens from ``starts[r]`` on; what would lie past the end is the last token again."""
        positions = np.asarray(starts)[:, None] + np.arange(width or self.width)
        at = np.minimum(positions, self.width - 1)
        return self.map(lambda x: x[np.arange(ROWS)[:, None], at], inputs)

    def token(self, inputs: Any, at: int) -> Any:
        """One token of each row: [ROWS, ...] of [ROWS, width, ...]."""
        return self.map(lambda x: x[:, at], inputs)

    def choose(self, flags: Array, inputs: Any, others: Any) -> Any:
        """``inputs`` where ``flags`` (bool[rows] or bool[rows, width]) is set, else ``others``."""

        def one(x: Array, y: Array) -> Array:
            return choose(flags, x, y)

        return self._jax.tree.map(one, inputs, others)

    def map(self, function: Callable[[Array], Array], inputs: Any) -> Any:
        """``function`` of each array of the inputs."""
        return self._jax.tree.map(function, inputs)

    @cached_property
    def zeros(self) -> State:
        """The state of fresh sequences."""
        return tuple(np.zeros_like(x) for x in self.read(HOME))

    @cached_property
    def inputs(self) -> Any:
        """The tokens that most checks run."""
        return self.random(1)

    @cached_property
    def warm(self) -> State:
        """States after some other tokens, from which most checks start."""
        lens = [self.width - row for row in range(ROWS)]
        return self.prefill(self.random(2), self.zeros, lens)[1]

    @cached_property
    def whole(self) -> tuple[Array, State]:
        """`inputs` from `warm` in one prefill."""
        return self.prefill(self.inputs, self.warm, [self.width] * ROWS)

    @cached_property
    def by_step(self) -> Trajectory:
        """`inputs` from `warm` token by token."""
        return self.walk(self.inputs, self.warm, self.width)

    # -- shapes --------------------------------------------------------------------------------

    def declared(self) -> list[Returned]:
        """What `state_layout` says of the states of a batch."""
        return [
            Returned(
                buffer.name,
                (ROWS, *buffer.shape),
                self.dtype if buffer.dtype == MODEL_DTYPE else buffer.dtype,
            )
            for buffer in self.layout.buffers
        ]

    @cached_property
    def shapes(self) -> dict[str, tuple[Returned, list[Returned]]]:
        """Output and states that the suite's ``prefill`` and ``step`` return; runs nothing."""
        return {name: self._shapes_of(name) for name in ("prefill", "step")}

    def _shapes_of(self, name: str) -> tuple[Returned, list[Returned]]:
        (layer,) = self.pool.buffers
        state = self._jax.eval_shape(layer.gather, HOME.astype(np.int32))
        if name == "prefill":
            arguments = (self.inputs, state, np.zeros(ROWS, np.int32))
        else:
            arguments = (self.token(self.inputs, 0), state)
        returned = self._jax.eval_shape(getattr(self._suite, name), *arguments)
        out, new = self._unpacked(name, returned)
        return _returned("out", out), self._named(new)

    @property
    def pool_bytes_per_slot(self) -> int:
        """Bytes of the device arrays, per slot."""
        return sum(x.nbytes for x in self._jax.tree.leaves(self.pool.buffers)) // NUM_SLOTS

    def _unpacked(self, name: str, returned: Any) -> tuple[Any, tuple[Any, tuple[Any, ...]]]:
        """What a function returned, if it is ``(outputs, (temporal, convs))``.

        Raises AssertionError that shows what it is instead.
        """
        tree = self._jax.tree
        wanted = ("outputs", ("temporal", tuple(self.names[1:])))
        match returned:
            case (out, (temporal, (*convs,))):
                unpacked = out, (temporal, tuple(convs))
                if tree.structure(unpacked) == tree.structure(wanted):
                    return unpacked
            case _:
                pass
        shown = repr(tree.map(_shown, returned))
        raise AssertionError(
            f"{name} must return (outputs, (temporal, convs)), "
            f"here {wanted!r}; it returns {shown}".replace("'", "")
        )

    def _named(self, state: Any) -> list[Returned]:
        temporal, convs = state
        arrays = (temporal, *convs)
        return [_returned(name, x) for name, x in zip(self.names, arrays, strict=True)]

    # -- what is jitted ------------------------------------------------------------------------

    def _prefill_slots(self, buffers: Any, inputs: Any, slots: Any, lens: Any) -> Any:
        (layer,) = buffers
        returned = self._suite.prefill(inputs, layer.gather(slots), lens)
        out, state = self._unpacked("prefill", returned)
        return out, (layer.scatter(self._stored(state), slots),)

    def _step_slots(self, buffers: Any, inputs: Any, slots: Any) -> Any:
        (layer,) = buffers
        out, state = self._unpacked("step", self._suite.step(inputs, layer.gather(slots)))
        return out, (layer.scatter(self._stored(state), slots),)

    def _stored(self, state: Any) -> Any:
        """The state as it came: the pool would cast another dtype in silence."""
        check_declared(self._named(state), self.declared())
        (layer,) = self.pool.buffers
        return type(self._jax.eval_shape(layer.gather, HOME.astype(np.int32)))(*state)

    def _cast(self, x: Any) -> Array:
        array = np.asarray(x)
        if not np.issubdtype(array.dtype, np.floating):
            return array
        return array.astype(self._jax.numpy.dtype(self.dtype))


def check_declared(returned: Sequence[Returned], declared: Sequence[Returned]) -> None:
    """Raise AssertionError naming the first buffer whose shape or dtype is not the declared one."""
    for got, said in zip(returned, declared, strict=True):
        if got != said:
            raise AssertionError(
                f"state buffer {got.name!r}: the kernel returns {got.dtype}{list(got.shape)}, "
                f"{got.bytes_per_row} bytes a slot; state_layout declares {said.dtype}"
                f"{list(said.shape)}, {said.bytes_per_row} bytes a slot"
            )


def _shown(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _returned(name: str, x: Any) -> Returned:
    return Returned(name, tuple(x.shape), str(x.dtype))
