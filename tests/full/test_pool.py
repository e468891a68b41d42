"""KVPool: allocation, reading, writing, donation, sharding."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from uhrc_core.errors import InvalidIndexError
from uhrc_full.layout import GQAShape, MLAShape, lay_out
from uhrc_full.pool import KVPool

SHAPES = [GQAShape(3, 64), MLAShape(16, 8)]


def make_pool(platform: str = "cpu") -> KVPool:
    return KVPool(lay_out(SHAPES, page_size=4, num_tokens=16, platform=platform))


def arrays(num_tokens: int):
    rng = np.random.default_rng(0)
    shapes = (((3, 64), (3, 64)), ((24,),))
    return tuple(
        tuple(rng.standard_normal((num_tokens, *shape)).astype(np.float32) for shape in layer)
        for layer in shapes
    )


def test_a_fresh_pool_has_the_bytes_of_its_plan():
    pool = make_pool()
    assert sum(a.nbytes for a in jax.tree.leaves(pool.buffers)) == pool.layout.total_bytes


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_read_gives_back_what_was_written_in_logical_shape(platform):
    pool, written = make_pool(platform), arrays(3)
    pool.write([15, 0, 7], written)
    for layer, expected in zip(pool.read([7, 15]), written, strict=True):
        for got, want in zip(layer, expected, strict=True):
            np.testing.assert_array_equal(got, want[[2, 0]])
    assert all(not a.any() for layer in pool.read([1, 14]) for a in layer)


@pytest.mark.parametrize("index", [-1, 16])
def test_an_index_outside_the_pool_is_refused(index):
    pool = make_pool()
    message = f"token index {index} is outside this pool of 16 tokens"
    with pytest.raises(InvalidIndexError, match=message):
        pool.read([0, index])
    with pytest.raises(InvalidIndexError, match=message):
        pool.write([0, index], arrays(2))


def test_writing_keeps_the_buffers_where_they_are():
    pool = make_pool()
    pool.write([0], arrays(1))
    pool.read([0])  # a host copy must not keep the buffers alive
    before = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(pool.buffers)]
    pool.write([1], arrays(1))
    assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(pool.buffers)] == before


def test_pages_are_split_over_data_and_heads_over_tensor():
    """8 virtual devices, 4 dp ranks x 2 tensor shards; writes land as without a mesh."""
    code = """
import jax, numpy as np
from jax.sharding import Mesh
from uhrc_full.layout import GQAShape, MLAShape, lay_out
from uhrc_full.pool import KVPool
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
shapes = [GQAShape(4, 8), GQAShape(3, 8), MLAShape(4, 4)]
plan = lay_out(shapes, page_size=2, num_tokens=8, dp_size=4)
pool = KVPool(plan, mesh)
shard_shapes = [a.sharding.shard_shape(a.shape) for a in jax.tree.leaves(pool.buffers)]
assert shard_shapes == [(4, 2, 2, 8)] * 2 + [(4, 2, 3, 8)] * 2 + [(4, 2, 8)], shard_shapes
before = pool.buffers[0].k.sharding
k, v, latent = np.ones((2, 4, 8)), np.ones((2, 3, 8)), np.ones((2, 8))
pool.write([1, 31], ((k, k), (v, v), (latent,)))
assert pool.buffers[0].k.sharding == before
assert [float(a.sum()) for layer in pool.read([31]) for a in layer] == [32, 32, 24, 24, 8]
"""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
