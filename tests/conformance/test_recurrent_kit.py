"""The recurrent kit itself: a sound backend passes, and each planted fault is named."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from tests.conformance.failures import check_named
from tests.conformance.leaky import LEAKY, LeakyConformance, LeakyParams, state_layout
from uhrc_core.recurrent import BufferShape, StateLayout
from uhrc_recurrent.pool import RecurrentStatePool


class TestLeaky(LeakyConformance):
    """Every check passes on a sound backend."""


class Faulty(LeakyConformance):
    """One dtype, to be quick."""

    model_dtypes = ("float32",)


class FreshEachTime(Faulty):
    def prefill(self, inputs, state, lens):
        zeros = state._replace(temporal=state.temporal * 0, convs=(state.convs[0] * 0,))
        return super().prefill(inputs, zeros, lens)


class OneTokenLate(Faulty):
    def prefill(self, inputs, state, lens):
        out, _ = super().prefill(inputs, state, lens)
        return out, super().prefill(inputs, state, jnp.maximum(lens - 1, 0))[1]


class WritesIdleRows(Faulty):
    def prefill(self, inputs, state, lens):
        return super().prefill(inputs, state, jnp.maximum(lens, 1))


class ReadsPadding(Faulty):
    def prefill(self, inputs, state, lens):
        out, state = super().prefill(inputs, state, lens)
        return out, state._replace(temporal=state.temporal + 0 * inputs.sum())


class LooksAtItsNeighbour(Faulty):
    def prefill(self, inputs, state, lens):
        out, state = super().prefill(inputs, state, lens)
        return out + 1e-6 * jnp.roll(out, 1, axis=0), state


class StepLooksAtItsNeighbour(Faulty):
    def prefill(self, inputs, state, lens):
        return LeakyConformance().prefill(inputs, state, lens)

    def step(self, inputs, state):
        out, state = super().step(inputs, state)
        return out, state._replace(temporal=state.temporal + 1e-7 * state.temporal.max())


class NarrowOutputs(Faulty):
    def step(self, inputs, state):
        out, state = super().step(inputs, state)
        return out.astype(jnp.bfloat16), state


class WidensItsConv(LeakyConformance):
    def step(self, inputs, state):
        out, state = super().step(inputs, state)
        return out, state._replace(convs=(state.convs[0].astype(jnp.float32),))

    def prefill(self, inputs, state, lens):
        out, new = LeakyConformance().prefill(inputs, state, lens)
        return out, new._replace(convs=(new.convs[0].astype(jnp.float32),))


class DeclaresTooFewBytes(Faulty):
    """Computes its temporal state in float32, says that it is kept in bfloat16."""

    spec = replace(
        LEAKY,
        state_layout=lambda params: replace(
            state_layout(params), temporal=BufferShape("temporal", (2, 1, 3), "bfloat16")
        ),
    )

    def prefill(self, inputs, state, lens):
        wide = state._replace(temporal=state.temporal.astype(jnp.float32))
        return super().prefill(inputs, wide, lens)


class CountsItsBytesWrong(Faulty):
    class Layout(StateLayout):
        def bytes_per_slot(self, model_dtype):
            return 10

    spec = replace(
        LEAKY,
        state_layout=lambda params: CountsItsBytesWrong.Layout(
            state_layout(params).temporal, state_layout(params).convs
        ),
    )


class ForgetsItsConv(RecurrentStatePool):
    def copy_slots(self, src, dst):
        before = self.read(dst)
        super().copy_slots(src, dst)
        after = self.read(dst)
        self.write(dst, [a._replace(convs=b.convs) for a, b in zip(after, before, strict=True)])


class ConvNotCloned(Faulty):
    def make_pool(self, num_slots, dtype):
        return ForgetsItsConv(super().make_pool(num_slots, dtype).plan)


class CutsOnlyAtFour(Faulty):
    """Promises the bits at every chunk of 2 tokens, and rounds what it carries at every cut."""

    spec = replace(LEAKY, kernel_chunk=2)

    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        return out, new._replace(
            temporal=new.temporal * (1 + 2e-7 * (lens > 0)[:, None, None, None])
        )


class BlowsUp(Faulty):
    """As an unstable inverse does when all keys are the same."""

    def prefill(self, inputs, state, lens):
        out, state = super().prefill(inputs, state, lens)
        same = jnp.all(inputs == inputs[:, :1], axis=(1, 2))[:, None, None, None]
        return jnp.where(same, out * 1e20, out), state


class ClaimsEverything(Faulty):
    spec = replace(
        LEAKY,
        matches_hf_config=lambda config: LEAKY.matches_hf_config(LeakyConformance.hf_configs[0]),
    )


class KnowsNothing(Faulty):
    spec = replace(LEAKY, matches_hf_config=lambda config: None)


class FractionParams(LeakyParams):
    decay: float = 0.5


class ParamsOfFractions(Faulty):
    spec = replace(LEAKY, params_model=FractionParams)
    params = FractionParams(num_heads=2, head_dim=3)


FAULTS = {
    FreshEachTime: "prefill forgets the initial state",
    OneTokenLate: "it is the state after 6 tokens: off by one",
    WritesIdleRows: "prefill wrote to a padding row's slot (slot 2): state buffer 'temporal'",
    ReadsPadding: "prefill reads padding, row 0",
    LooksAtItsNeighbour: "row 0 looks at its neighbours: prefill outputs",
    StepLooksAtItsNeighbour: "looks at its neighbours: state buffer 'temporal'",
    NarrowOutputs: "prefill returns outputs in bfloat16, output_dtype says float32",
    WidensItsConv: "state buffer 'conv': the kernel returns float32[4, 1, 6], 24 bytes a slot; "
    "state_layout declares bfloat16[4, 1, 6], 12 bytes a slot",
    DeclaresTooFewBytes: "24 bytes a slot; state_layout declares bfloat16[4, 2, 1, 3], 12 bytes",
    CountsItsBytesWrong: "state_layout declares 10 bytes a slot, the pool takes 48",
    ConvNotCloned: "clone not complete: state buffer 'conv': not the same bits",
    CutsOnlyAtFour: "cut at 2, kernel_chunk 2",
    BlowsUp: "identical tokens, prefill against steps",
    ClaimsEverything: "matches_hf_config claims a foreign model: {}",
    KnowsNothing: "model_type 'leaky' was answered with None",
    ParamsOfFractions: "params: every field must be an int, got {'decay': 0.5}",
}


@pytest.mark.parametrize("suite", FAULTS, ids=lambda suite: suite.__name__)
def test_a_planted_fault_is_named(suite):
    check_named(suite, FAULTS[suite])
