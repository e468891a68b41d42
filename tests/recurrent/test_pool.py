"""The recurrent state pool: whole states in and out of slots, clones, in place, sharded."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_core.errors import InvalidIndexError
from uhrc_recurrent.backends import GDN, KDA
from uhrc_recurrent.kernels.slot_copy import copy_slots
from uhrc_recurrent.layout import lay_out
from uhrc_recurrent.pool import LayerState, RecurrentStatePool

KDA_STATE = KDA.state_layout(KDA.params_model(num_heads=2, head_dim=8, conv_kernel=4))
GDN_STATE = GDN.state_layout(
    GDN.params_model(
        num_key_heads=1, num_value_heads=3, key_head_dim=8, value_head_dim=4, conv_kernel=3
    )
)
STATES = (KDA_STATE, GDN_STATE, KDA_STATE)
SLOTS = 6


def make_pool(platform="cpu", dtype="float32", fill=None, dp_size=1):
    plan = lay_out(STATES, num_slots=SLOTS, dp_size=dp_size, model_dtype=dtype, platform=platform)
    pool = RecurrentStatePool(plan)
    if fill is not None:
        pool.replace(jax.tree.map(lambda a: jnp.full_like(a, fill), pool.buffers))
    return pool


def random_states(rows, seed=0):
    """Distinct values in every buffer of every layer, exact in bfloat16."""
    rng = np.random.default_rng(seed)

    def draw(buffer):
        return rng.integers(1, 100, (rows, *buffer.shape)).astype(np.float32)

    return [LayerState(draw(s.temporal), tuple(draw(c) for c in s.convs)) for s in STATES]


def assert_states_equal(actual, expected):
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected) == 12
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def untouched_slots(pool):
    """Slots in which every element of every array is still NaN."""
    arrays = [np.asarray(a) for a in jax.tree.leaves(pool.buffers)]
    return [s for s in range(SLOTS) if all(np.isnan(a[s]).all() for a in arrays)]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_and_other_slots_are_not_touched(platform, dtype):
    pool = make_pool(platform, dtype)
    states = random_states(2)
    pool.write([4, 1], states)
    assert_states_equal(pool.read([4, 1]), states)
    assert_states_equal(pool.read([0, 5]), jax.tree.map(np.zeros_like, states))


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_clone_takes_every_buffer_of_every_layer(platform):
    """A clone without a conv, or without a layer, leaves NaN here."""
    pool = make_pool(platform, fill=jnp.nan)
    states = random_states(2)
    pool.write([0, 3], states)
    pool.copy_slots([3, 0], [5, 2])
    assert_states_equal(pool.read([2, 5]), states)
    assert_states_equal(pool.read([0, 3]), states)
    assert untouched_slots(pool) == [1, 4]


def test_clone_is_a_copy_and_not_a_view():
    pool = make_pool()
    pool.write([0], random_states(1))
    pool.copy_slots([0], [1])
    pool.write([0], random_states(1, seed=1))
    assert_states_equal(pool.read([1]), random_states(1))


def test_clone_of_nothing_does_nothing():
    pool = make_pool(fill=jnp.nan)
    pool.copy_slots([], [])
    assert untouched_slots(pool) == list(range(SLOTS))


def test_zero_makes_a_fresh_state_of_a_dirty_slot():
    pool = make_pool(fill=jnp.nan)
    pool.zero([2, 4])
    assert_states_equal(pool.read([2, 4]), jax.tree.map(np.zeros_like, random_states(2)))
    assert untouched_slots(pool) == [0, 1, 3, 5]


def test_a_step_gathers_scatters_and_tracks_masked_rows_only():
    pool = make_pool(fill=jnp.nan)
    pool.write([0, 1, 2], random_states(3))

    @partial(jax.jit, donate_argnums=0)
    def step(buffers, slots, track_slots, mask):
        new = []
        for layer in buffers:
            state = jax.tree.map(lambda x: x + 1, layer.gather(slots))
            new.append(layer.scatter(state, slots).track(state, track_slots, mask))
        return tuple(new)

    pool.replace(
        step(
            pool.buffers,
            np.int32([2, SLOTS, 0]),
            np.int32([5, 4, 3]),
            np.array([True, False, False]),
        )
    )
    expected = jax.tree.map(lambda x: x + 1, random_states(3))
    rows = [jax.tree.map(lambda x, r=r: x[r : r + 1], expected) for r in range(3)]
    assert_states_equal(pool.read([2]), rows[2])
    assert_states_equal(pool.read([0]), rows[0])
    assert_states_equal(pool.read([5]), rows[2])
    kept = jax.tree.map(lambda x: x[1:2], random_states(3))
    assert_states_equal(pool.read([1]), kept)
    assert untouched_slots(pool) == [3, 4]


def test_padded_rows_start_from_a_fresh_state():
    pool = make_pool(fill=jnp.nan)
    state = pool.buffers[0].gather(jnp.int32([-1, SLOTS]))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_copy_and_step_update_the_pool_where_it_lies(platform):
    """From XLA's memory analysis: the pool is aliased and no temporary is of a pool's size."""
    plan = lay_out(STATES, num_slots=512, platform=platform)
    pool = RecurrentStatePool(plan)
    src, dst = jnp.full(64, -1), jnp.full(64, -1)

    def step(buffers, slots, track_slots, mask):
        states = [jax.tree.map(lambda x: x * 2, layer.gather(slots)) for layer in buffers]
        return tuple(
            layer.scatter(state, slots).track(state, track_slots, mask)
            for layer, state in zip(buffers, states, strict=True)
        )

    rows = 4
    slots = jnp.arange(rows)
    copy = jax.jit(copy_slots, donate_argnums=0).lower(pool.buffers, src, dst).compile()
    stepped = jax.jit(step, donate_argnums=0).lower(pool.buffers, slots, slots + 9, slots > 1)
    for compiled, states_held in ((copy, 2), (stepped.compile(), 3 * rows)):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= plan.total_bytes
        assert memory.temp_size_in_bytes <= states_held * plan.bytes_per_unit + 4096
    moved = copy.cost_analysis()["bytes accessed"]
    # A clone reads a state and writes it; XLA counts the row in between too, and the slot lists.
    assert 2 * plan.bytes_per_unit <= moved <= 4 * plan.bytes_per_unit + 8192
    pointers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(pool.buffers)]
    pool.copy_slots([1, 2], [3, 4])
    assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(pool.buffers)] == pointers


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([0], [12], "slot 12 is outside this pool of 12 slots"),
        ([-1], [0], "slot -1 is outside"),
        ([0, 1], [2], "2 source slots for 1 targets"),
        ([0, 1], [2, 2], "targets must be distinct and none of them a source"),
        ([0, 1], [2, 0], "targets must be distinct and none of them a source"),
        ([5], [6], "crosses a dp rank; each has 6 slots"),
    ],
)
def test_a_wrong_clone_is_refused_and_changes_nothing(src, dst, message):
    pool = make_pool(dp_size=2)
    pool.write(range(3), random_states(3))
    before = pool.read(range(12))
    with pytest.raises(InvalidIndexError, match=message):
        pool.copy_slots(src, dst)
    assert_states_equal(pool.read(range(12)), before)


def test_reads_and_writes_outside_the_pool_are_refused():
    pool = make_pool()
    for call in (pool.read, pool.zero, lambda slots: pool.write(slots, random_states(1))):
        with pytest.raises(InvalidIndexError, match="slot 6 is outside this pool of 6 slots"):
            call([6])


def test_sharded_over_data_and_tensor_on_eight_devices():
    """Slots over "data", heads over "tensor": same values, clones stay on their shard, in place."""
    code = """
    import jax, numpy as np
    from jax.sharding import Mesh
    from tests.recurrent.test_pool import KDA_STATE, STATES, SLOTS, random_states
    from uhrc_recurrent.layout import lay_out
    from uhrc_recurrent.pool import RecurrentStatePool

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    plan = lay_out([KDA_STATE] * 2, num_slots=3, dp_size=4)
    pool = RecurrentStatePool(plan, mesh)
    temporal, conv = pool.buffers[0].arrays[:2]
    print(temporal.sharding.shard_shape(temporal.shape), conv.sharding.shard_shape(conv.shape))
    states = [s for i, s in enumerate(random_states(4)) if i != 1]
    pool.write([0, 3, 6, 11], states)
    pool.copy_slots([0, 3, 11], [2, 4, 9])
    got = pool.read([2, 4, 6, 9])
    print(all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(states))))
    print(not any(x.any() for x in jax.tree.leaves(pool.read([1, 5, 7, 8, 10]))))
    pool.zero([2])
    print(not any(x.any() for x in jax.tree.leaves(pool.read([2]))))
    args = (pool.buffers, np.int32([0, -1]), np.int32([1, -1]))
    compiled = pool._clone.lower(*args).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    print(memory.alias_size_in_bytes >= plan.total_bytes // 8, "all-gather" in text)
    print(pool.buffers[0].arrays[0].sharding == temporal.sharding)
    """
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.stdout.splitlines() == [
        "(3, 1, 8, 8) (3, 3, 8)",
        "True",
        "True",
        "True",
        "True False",
        "True",
    ], result.stderr[-2000:]
