"""Physical layouts of the recurrent states."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_core.errors import ConfigError
from uhrc_recurrent.backends import GDN, GLA, KDA
from uhrc_recurrent.layout import CellLayout, lay_out

KDA_STATE = KDA.state_layout(KDA.params_model(num_heads=2, head_dim=128, conv_kernel=4))


@pytest.mark.parametrize(
    ("logical", "physical"),
    [
        ((32, 128, 128), (32, 128, 128)),
        ((32, 64, 128), (32, 64, 128)),
        ((32, 64, 64), (32, 32, 128)),
        ((32, 128, 64), (32, 64, 128)),
        ((64, 96, 96), (64, 72, 128)),
        ((2, 16, 16), (2, 2, 128)),
        ((3, 8, 20), (3, 2, 128)),
        ((3, 4096), (4, 4096)),
        ((1, 128), (2, 128)),
        ((4, 200), (4, 256)),
        ((5, 128), (8, 128)),
    ],
)
def test_tpu_cells_fill_their_tiles_and_keep_their_values(logical, physical):
    cell = CellLayout.for_platform(logical, "tpu")
    assert cell.physical_shape == physical
    values = np.random.default_rng(0).random((3, *logical), np.float32)
    for xp in (np, jnp):
        packed = cell.pack(xp.asarray(values))
        assert packed.shape == (3, *physical)
        assert packed.sum() == pytest.approx(values.sum(), rel=1e-5)
        np.testing.assert_array_equal(cell.unpack(packed), values)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("logical", [(2, 16, 16), (3, 40)])
def test_other_platforms_store_the_logical_shape(logical, platform):
    assert CellLayout.for_platform(logical, platform).is_identity


def test_plan_counts_slots_over_ranks_and_bytes_over_layers():
    plan = lay_out([KDA_STATE] * 3, num_slots=4, dp_size=2, model_dtype="bfloat16")
    state = 3 * (2 * 128 * 128 * 4 + 3 * 3 * 256 * 2)
    assert (plan.num_slots, plan.num_units) == (4, 8)
    assert plan.bytes_per_unit == state == 3 * KDA_STATE.bytes_per_slot("bfloat16")
    assert plan.total_bytes == 8 * state
    assert [b.name for b in plan.layers[0]] == ["temporal", "conv_q", "conv_k", "conv_v"]
    assert plan.buffers[0].shape == (8, 2, 128, 128)


def test_tpu_plan_counts_the_padding():
    cpu, tpu = (lay_out([KDA_STATE], num_slots=1, platform=p) for p in ("cpu", "tpu"))
    assert tpu.bytes_per_unit - cpu.bytes_per_unit == 3 * 256 * 4  # one more row in each conv


@pytest.mark.parametrize(
    ("platform", "stored"), [("cpu", "uint16"), ("gpu", "bfloat16"), ("tpu", "bfloat16")]
)
def test_bfloat16_is_stored_as_bits_on_a_cpu_alone(platform, stored):
    plan = lay_out([KDA_STATE], num_slots=1, model_dtype="bfloat16", platform=platform)
    temporal, *convs = plan.layers[0]
    assert (temporal.dtype, temporal.stored_dtype) == ("float32", "float32")
    assert {(c.dtype, c.stored_dtype) for c in convs} == {("bfloat16", stored)}
    values = jnp.arange(3 * 256.0).reshape(1, 3, 256)
    rows = convs[0].pack(values)
    assert (rows.dtype, rows.shape[1:]) == (stored, convs[0].cell.physical_shape)
    back = convs[0].unpack(rows)
    assert back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(back, values.astype(jnp.bfloat16))


def test_asymmetric_heads_and_no_conv():
    gdn = GDN.state_layout(
        GDN.params_model(
            num_key_heads=2, num_value_heads=6, key_head_dim=8, value_head_dim=16, conv_kernel=3
        )
    )
    gla = GLA.state_layout(GLA.params_model(num_heads=3, head_dim=8))
    plan = lay_out([gdn, gla], num_slots=5)
    assert [b.shape for b in plan.layers[0]] == [(5, 6, 8, 16), (5, 2, 16), (5, 2, 16), (5, 2, 96)]
    assert [b.shape for b in plan.layers[1]] == [(5, 3, 8, 8)]


def test_every_problem_of_a_plan_is_reported():
    with pytest.raises(ConfigError) as error:
        lay_out([], num_slots=0, dp_size=-1, model_dtype="int8")
    assert error.value.problems == (
        "num_slots = 0: must be a positive integer",
        "dp_size = -1: must be a positive integer",
        "the model has no recurrent layer: it needs no recurrent state pool",
        "dtype = 'int8': conv states are one of float32, bfloat16, float16",
    )
