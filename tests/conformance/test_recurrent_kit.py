"""The recurrent kit itself: a sound backend passes, and each planted fault is named."""

from __future__ import annotations

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.conformance.failures import check_named_first
from tests.conformance.leaky import LEAKY, LeakyConformance, LeakyParams, state_layout
from uhrc_core.registry.recurrent import BufferShape, StateLayout
from uhrc_core.testing import RecurrentDeclarationConformance
from uhrc_core.testing.compare import check_same_bits, difference
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


class PrefillForgetsItsTemporal(Faulty):
    def prefill(self, inputs, state, lens):
        return super().prefill(inputs, state._replace(temporal=state.temporal * 0), lens)


class PrefillForgetsItsConv(Faulty):
    def prefill(self, inputs, state, lens):
        return super().prefill(inputs, state._replace(convs=(state.convs[0] * 0,)), lens)


class FinalStateForgetsItsTemporal(Faulty):
    """Outputs are right; the state that is kept was summed up from zeros."""

    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        fresh = state._replace(temporal=state.temporal * 0)
        return out, new._replace(temporal=super().prefill(inputs, fresh, lens)[1].temporal)


class OutputsForgetTheTemporal(Faulty):
    """The state that is kept is right; outputs are read from one that was summed up from zeros."""

    def prefill(self, inputs, state, lens):
        fresh = state._replace(temporal=state.temporal * 0)
        out, _ = super().prefill(inputs, fresh, lens)
        return out, super().prefill(inputs, state, lens)[1]


class SoundPrefill(Faulty):
    """For faults of `step` alone."""

    def prefill(self, inputs, state, lens):
        return LeakyConformance().prefill(inputs, state, lens)


class StepForgetsItsTemporal(SoundPrefill):
    def step(self, inputs, state):
        return super().step(inputs, state._replace(temporal=state.temporal * 0))


class StepForgetsItsConv(SoundPrefill):
    def step(self, inputs, state):
        return super().step(inputs, state._replace(convs=(state.convs[0] * 0,)))


class OutputsOfStepForgetTheTemporal(SoundPrefill):
    def step(self, inputs, state):
        fresh = state._replace(temporal=state.temporal * 0)
        return super().step(inputs, fresh)[0], super().step(inputs, state)[1]


class TemporalOneTokenLate(Faulty):
    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        late = super().prefill(inputs, state, jnp.maximum(lens - 1, 0))[1]
        return out, new._replace(temporal=late.temporal)


class ConvOneTokenLate(Faulty):
    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        late = super().prefill(inputs, state, jnp.maximum(lens - 1, 0))[1]
        return out, new._replace(convs=late.convs)


class TemporalOneTokenEarly(Faulty):
    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        early = super().prefill(inputs, state, lens + 1)[1]
        return out, new._replace(temporal=early.temporal)


class ConvNotUpdated(Faulty):
    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        return out, new._replace(convs=state.convs)


class IgnoresLens(Faulty):
    def prefill(self, inputs, state, lens):
        return super().prefill(inputs, state, jnp.full_like(lens, inputs.shape[1]))


class OutputsWrongFromAToken(Faulty):
    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        return out.at[1:, 4:].mul(2), new


class ReturnsTemporalAlone(Faulty):
    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        return out, new.temporal


class ReturnsThree(SoundPrefill):
    def step(self, inputs, state):
        out, new = super().step(inputs, state)
        return out, new.temporal, new.convs


class ConvNotInATuple(Faulty):
    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        return out, (new.temporal, new.convs[0])


class NoConvAtAll(Faulty):
    def prefill(self, inputs, state, lens):
        out, new = super().prefill(inputs, state, lens)
        return out, (new.temporal, ())


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


class StepLooksAtItsNeighbour(SoundPrefill):
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
        return ForgetsItsConv(super().make_pool(num_slots, dtype).layout)


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


class NoConfigs(Faulty):
    hf_configs = RecurrentDeclarationConformance.hf_configs


class KnowsNothing(Faulty):
    spec = replace(LEAKY, matches_hf_config=lambda config: None)


class FractionParams(LeakyParams):
    decay: float = 0.5


class ParamsOfFractions(Faulty):
    spec = replace(LEAKY, params_model=FractionParams)
    params = FractionParams(num_heads=2, head_dim=3)


WANTED = "must return (outputs, (temporal, convs)), here (outputs, (temporal, (conv,)))"
OUT, TEMPORAL, CONV = "float32[4, 7, 2, 3]", "float32[4, 2, 1, 3]", "float32[4, 1, 6]"
#: What the first check that fails says, parts of it set apart by "...".
FAULTS = {
    FreshEachTime: "prefill forgets the initial state, buffer 'temporal' (row 0): with another "
    "one, nothing changes",
    PrefillForgetsItsTemporal: "prefill forgets the initial state, buffer 'temporal' (row 0): with "
    "another one, nothing changes",
    PrefillForgetsItsConv: "prefill forgets the initial state, buffer 'conv' (row 0): with another "
    "one, nothing changes",
    FinalStateForgetsItsTemporal: "prefill forgets the initial state, buffer 'temporal' (row 0): "
    "with another one, step gives other final 'temporal' in 2 tokens, and prefill the same",
    OutputsForgetTheTemporal: "prefill forgets the initial state, buffer 'temporal' (row 0): with "
    "another one, step gives other outputs in 2 tokens, and prefill the same",
    OutputsOfStepForgetTheTemporal: "step forgets the initial state, buffer 'temporal' (row 0): "
    "with another one, prefill gives other outputs in 2 tokens, and step the same",
    StepForgetsItsTemporal: "step forgets the initial state, buffer 'temporal' (row 0): with "
    "another one, nothing changes",
    StepForgetsItsConv: "step forgets the initial state, buffer 'conv' (row 0): with another one, "
    "nothing changes",
    OneTokenLate: "state after 7 tokens, buffer 'temporal': differ by ...; "
    "it is the state after 6 tokens: off by one",
    TemporalOneTokenLate: "row 0: state after 7 tokens, buffer 'temporal': differ by ...; "
    "it is the state after 6 tokens: off by one",
    ConvOneTokenLate: "row 0: state after 7 tokens, buffer 'conv': differ by ...; "
    "it is the state after 6 tokens: off by one",
    TemporalOneTokenEarly: "row 1: state after 1 tokens, buffer 'temporal': differ by ...; "
    "it is the state after 2 tokens: off by one",
    ConvNotUpdated: "row 0: state after 7 tokens, buffer 'conv': differ by ...; "
    "it is the state after 0 tokens: the initial state, not updated",
    IgnoresLens: "row 1: state after 1 tokens, buffer 'temporal': differ by ...; "
    "it is the state after 7 tokens: lens is not looked at",
    OutputsWrongFromAToken: "prefill against steps: states are right: outputs: differ by ...; "
    "the first is token 4 of row 3",
    ReturnsTemporalAlone: f"prefill {WANTED}; it returns ({OUT}, {TEMPORAL})",
    ReturnsThree: f"step {WANTED}; it returns (float32[4, 2, 3], {TEMPORAL}, ({CONV},))",
    ConvNotInATuple: f"prefill {WANTED}; it returns ({OUT}, ({TEMPORAL}, {CONV}))",
    NoConvAtAll: f"prefill {WANTED}; it returns ({OUT}, ({TEMPORAL}, ()))",
    WritesIdleRows: "prefill changes the state of a row of 0 tokens (slot 2): state buffer "
    "'temporal': not the same bits: nan where there was a number",
    ReadsPadding: "prefill reads padding, row 0: state buffer 'temporal': not the same bits: nan "
    "where there was a number, in 6 of 6 values, the first at [0, 0, 0, 0]",
    LooksAtItsNeighbour: "row 0 looks at its neighbours: prefill outputs",
    StepLooksAtItsNeighbour: "looks at its neighbours: state buffer 'temporal'",
    NarrowOutputs: "prefill returns outputs in bfloat16, output_dtype says float32",
    WidensItsConv: "state buffer 'conv': the kernel returns float32[4, 1, 6], 24 bytes a slot; "
    "state_layout declares bfloat16[4, 1, 6], 12 bytes a slot",
    DeclaresTooFewBytes: "24 bytes a slot; state_layout declares bfloat16[4, 2, 1, 3], 12 bytes",
    CountsItsBytesWrong: "state_layout declares 10 bytes a slot, the pool takes 48",
    ConvNotCloned: "clone not complete: state buffer 'conv': not the same bits: nan where there "
    "was a number",
    CutsOnlyAtFour: "cut at 2, kernel_chunk 2",
    BlowsUp: "identical tokens, prefill against steps: outputs: ...; the first is token 0 of row 0",
    ClaimsEverything: "matches_hf_config claims a foreign model: {}",
    NoConfigs: "hf_configs is missing: give the suite the contents of one config.json or more that "
    "matches_hf_config must know, such as hf_configs = ({'model_type': 'leaky', "
    "'num_hidden_layers': 4, 'num_heads': 2, 'head_dim': 3},)",
    KnowsNothing: "model_type 'leaky' was answered with None",
    ParamsOfFractions: "params: every field must be an int, got {'decay': 0.5}",
}


@pytest.mark.parametrize("suite", FAULTS, ids=lambda suite: suite.__name__)
def test_the_first_failure_names_a_planted_fault(suite):
    check_named_first(suite, FAULTS[suite])


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([1.0, np.nan], [1.0, 2.0], "nan where there was a number, in 1 of 2 values, the first at"),
        ([1.0, 2.0], [1.0, np.nan], "a number where there was nan, in 1 of 2 values, the first at"),
        ([-np.inf, 2.0], [1.0, 2.0], "inf where there was a number, in 1 of 2 values"),
        ([0.0, 2.0], [-0.0, 2.0], "the values are equal, but not the sign of a zero"),
        ([1.0, np.inf], [1.5, np.inf], "values differ by up to 0.5"),
        ([1.0], [1.0, 2.0], "float64[1], not float64[2]"),
    ],
)
def test_other_bits_are_called_by_their_name(actual, expected, message):
    with pytest.raises(AssertionError, match=re.escape(f"here: not the same bits: {message}")):
        check_same_bits(np.array(actual), np.array(expected), "here")


def test_what_is_not_a_number_is_no_small_difference():
    nan, one = np.array([np.nan, 1.0]), np.array([1.0, 1.0])
    assert difference(one, one + 1e-6, 1e-5) is None
    assert difference(one, one + 1e-4, 1e-5) == "differ by 0.0001, allowed is 1e-05"
    assert str(difference(nan, one, 1e-5)).startswith("nan where there was a number")
    assert difference(nan, nan, 1e-5) == "values that are not finite, in both"
