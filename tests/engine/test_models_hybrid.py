"""Hybrid models over real pools: what a row computes depends on its own tokens and state alone.

All pools are filled with NaN before each test: what is read without having been written shows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine import hybrid_runner
from tests.engine.hybrid_runner import SLOTS, Sequencer
from tests.oracle import hybrid
from uhrc_engine.runner import Bucket, Buckets

BUCKETS = Buckets(prefill=(Bucket(2, 64), Bucket(1, 192)), decode_rows=(2,))
IDS = np.random.default_rng(0).integers(0, 48, 192).astype(np.int32)
OTHER_IDS = IDS[::-1]


@pytest.fixture(scope="module", params=list(hybrid.EXACT_CONFIGS))
def built(request, tmp_path_factory):
    loaded = hybrid_runner.load(
        tmp_path_factory.mktemp(request.param), hybrid.EXACT_CONFIGS[request.param]
    )
    return Sequencer(loaded, BUCKETS)


@pytest.fixture
def sequencer(built) -> Sequencer:
    for pool in (built.full, built.states):
        pool.replace(jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), pool.buffers))
    return built


def arrays(sequencer: Sequencer, slot: int) -> list[np.ndarray]:
    """The whole state in a slot, every layer's temporal and convs."""
    return [a[0] for a in jax.tree.leaves(sequencer.states.read([slot]))]


def assert_same_state(sequencer: Sequencer, slot: int, other: int) -> None:
    for a, b in zip(arrays(sequencer, slot), arrays(sequencer, other), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tokens", [63, 64, 65, 127, 128, 190])
def test_chunks_on_the_grid_give_the_bits_of_one_piece(sequencer, tokens):
    whole = sequencer.feed(IDS, (0, tokens), 192, sequence=0, slot=0)[-1]
    cuts = (*range(0, tokens, 64), tokens)
    chunked = sequencer.feed(IDS, cuts, 64, sequence=1, slot=1)[-1]
    np.testing.assert_array_equal(chunked, whole)
    assert_same_state(sequencer, 0, 1)


def test_every_remainder_of_the_grid_computed_from_a_snapshot(sequencer):
    """128 + 1 to 128 + 63 tokens: from scratch, and from a clone of the state after 128."""
    sequencer.feed(IDS, (0, 128), 192, sequence=0, slot=0)
    for tokens in range(129, 192):
        sequencer.states.copy_slots([0], [1])
        hit = sequencer.feed(IDS, (128, tokens), 64, sequence=0, slot=1)
        scratch = sequencer.feed(IDS, (0, tokens), 192, sequence=1, slot=2)
        np.testing.assert_array_equal(hit, scratch, err_msg=f"{tokens} tokens")


def test_a_cloned_state_continues_with_the_same_bits(sequencer):
    sequencer.feed(IDS, (0, 128), 192, slot=0)
    sequencer.states.copy_slots([0], [4])
    ongoing = sequencer.feed(IDS, (128, 180), 64, slot=0)
    cloned = sequencer.feed(IDS, (128, 180), 64, slot=4)
    np.testing.assert_array_equal(cloned, ongoing)
    decoded = [sequencer.feed(IDS, (180, 181, 182), 1, slot=slot) for slot in (0, 4)]
    np.testing.assert_array_equal(*decoded)
    assert_same_state(sequencer, 0, 4)


def test_a_clone_without_one_of_its_buffers_computes_something_else(sequencer):
    """So that the test above would see a clone of the temporal buffer alone, or of all layers but
    one: each buffer of each layer is left out in turn. (Two tokens on: later, what the buffers held
    has decayed below rounding.)"""
    sequencer.feed(IDS, (0, 128), 192, slot=0)
    sequencer.states.copy_slots([0], [1])
    ongoing = sequencer.feed(IDS, (128, 130), 64, slot=1)
    leaves, structure = jax.tree.flatten(sequencer.states.read([0]))
    for i, leaf in enumerate(leaves):
        partial = [*leaves[:i], np.zeros_like(leaf), *leaves[i + 1 :]]
        sequencer.states.write([4], jax.tree.unflatten(structure, partial))
        assert not np.array_equal(sequencer.feed(IDS, (128, 130), 64, slot=4), ongoing)


def test_the_track_slot_receives_the_final_state(sequencer):
    rows = [
        sequencer.row(IDS[:64], 0, sequence=0, slot=0, track=5),
        sequencer.row(OTHER_IDS[:30], 0, sequence=1, slot=1),
    ]
    sequencer.step(rows, 64)
    assert_same_state(sequencer, 0, 5)
    sequencer.step([sequencer.row(IDS[64:65], 64, sequence=0, slot=0, track=6)], 1)
    assert_same_state(sequencer, 0, 6)
    assert not np.array_equal(arrays(sequencer, 5)[0], arrays(sequencer, 6)[0])


def test_a_row_has_the_same_bits_alone_and_beside_another(sequencer):
    sequencer.feed(IDS, (0, 64), 192, sequence=0, slot=0)
    alone = sequencer.feed(IDS, (64, 100), 192, sequence=0, slot=0)[0]
    sequencer.feed(IDS, (0, 64), 192, sequence=1, slot=1)
    rows = [
        sequencer.row(OTHER_IDS[:64], 0, sequence=2, slot=2),
        sequencer.row(IDS[64:100], 64, sequence=1, slot=1),
    ]
    np.testing.assert_array_equal(sequencer.step(rows, 64)[1], alone)
    assert_same_state(sequencer, 0, 1)


@pytest.mark.parametrize(("tokens", "width"), [(37, 64), (1, 1)])
def test_only_the_slots_of_the_rows_are_written(sequencer, tokens, width):
    """The step's bucket has a second, padding row; the slot was NaN and the state started at 0."""
    sequencer.step([sequencer.row(IDS[:tokens], 0, sequence=0, slot=3, track=6)], width)
    for array in jax.tree.leaves(sequencer.states.read(range(SLOTS))):
        by_slot = np.isnan(array).reshape(SLOTS, -1)
        assert np.flatnonzero(~by_slot.any(axis=1)).tolist() == [3, 6]
        assert np.flatnonzero(by_slot.all(axis=1)).tolist() == [0, 1, 2, 4, 5, 7]


@pytest.mark.parametrize("bucket", [Bucket(2, 64), Bucket(2, 1)])
def test_the_pools_are_updated_in_place(sequencer, bucket):
    """Every byte of both pools is aliased, no array is copied, and the pointers stay."""
    program = sequencer.runner.program(bucket)
    pools = (sequencer.full, sequencer.states)
    assert program.memory_analysis().alias_size_in_bytes == sum(p.layout.total_bytes for p in pools)
    shapes = {
        f"f32[{','.join(map(str, a.shape))}]" for p in pools for a in jax.tree.leaves(p.buffers)
    }
    copies = [line for line in program.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if any(s in line.split(" copy(")[0] for s in shapes)]
    before = [a.unsafe_buffer_pointer() for p in pools for a in jax.tree.leaves(p.buffers)]
    ids = IDS[: bucket.width]
    sequencer.step([sequencer.row(ids, 0, 0, slot=0, track=1)], bucket.width)
    after = [a.unsafe_buffer_pointer() for p in pools for a in jax.tree.leaves(p.buffers)]
    assert after == before
