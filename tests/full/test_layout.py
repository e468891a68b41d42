"""The plan of a FULL pool: shapes, bytes, and the physical row of each platform."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from uhrc_core.errors import ConfigError
from uhrc_full.layout import GQAShape, LaneLayout, MLAShape, RowLayout, lay_out


def test_layout_needs_no_jax():
    code = "import sys, uhrc_full.layout; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_gqa_plan_on_cpu_is_the_logical_shape():
    plan = lay_out([GQAShape(3, 64)] * 30, page_size=16, num_tokens=4096)
    assert [spec.shape for spec in plan.layers[0]] == [(256, 16, 3, 64)] * 2
    assert [spec.name for spec in plan.layers[29]] == ["k", "v"]
    assert plan.bytes_per_unit == 30 * 2 * 3 * 64 * 4
    assert plan.total_bytes == 4096 * plan.bytes_per_unit


def test_mla_plan_has_one_latent_buffer_a_layer():
    plan = lay_out([MLAShape(512, 64)] * 2, page_size=128, num_tokens=1024, dtype="bfloat16")
    assert [spec.shape for spec in plan.buffers] == [(8, 128, 576)] * 2
    assert plan.bytes_per_unit == 2 * 576 * 2


def test_dp_ranks_multiply_the_tokens():
    plan = lay_out([GQAShape(1, 8)], page_size=4, num_tokens=12, dp_size=3)
    assert (plan.num_units, plan.num_pages) == (36, 9)


@pytest.mark.parametrize(
    ("heads", "dim", "rows_by_lanes"),
    [
        (8, 128, (8, 128)),
        (4, 128, (4, 128)),
        (2, 128, (2, 128)),
        (1, 128, (2, 128)),
        (3, 64, (2, 128)),
        (8, 64, (4, 128)),
        (32, 64, (16, 128)),
        (8, 256, (8, 256)),
        (4, 96, (4, 128)),
        (5, 32, (2, 128)),
    ],
)
def test_tpu_rows_fill_whole_tiles(heads, dim, rows_by_lanes):
    assert RowLayout.for_platform(heads, dim, "tpu").shape == rows_by_lanes


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (1, 128), (3, 64), (4, 96), (5, 32)])
def test_unpack_undoes_pack(platform, heads, dim):
    row = RowLayout.for_platform(heads, dim, platform)
    x = np.arange(2 * heads * dim, dtype=np.float32).reshape(2, heads, dim)
    assert row.pack(x).shape == (2, *row.shape)
    np.testing.assert_array_equal(row.unpack(row.pack(x)), x)


def test_latents_are_padded_to_whole_lanes_on_tpu():
    lanes = LaneLayout.for_platform(576, "tpu")
    x = np.ones((2, 576), np.float32)
    assert lanes.pack(x).shape == (2, 640)
    np.testing.assert_array_equal(lanes.unpack(lanes.pack(x)), x)


def test_every_problem_of_a_plan_is_reported_at_once():
    with pytest.raises(ConfigError) as error:
        lay_out([GQAShape(1, 8)], page_size=0, num_tokens=-4, dtype="int8")
    assert error.value.problems == (
        "page_size = 0: must be a positive integer",
        "num_tokens = -4: must be a positive integer",
        "dtype = 'int8': a KV pool is one of float32, bfloat16, float16",
    )


def test_tokens_must_fill_whole_pages():
    with pytest.raises(ConfigError, match="num_tokens = 100 is not a multiple of page_size = 16"):
        lay_out([GQAShape(1, 8)], page_size=16, num_tokens=100)
