"""The Runner: buckets, compilation, donation, and rows that do not feel their neighbours."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.paging import token_indices
from tests.oracle import tiny
from uhrc_core.kinds import ComponentType
from uhrc_engine.models.contract import PADDING_INDEX, StepInputs, StepRow, make_step_inputs
from uhrc_engine.runner import Bucket, Buckets, Runner, pad_inputs
from uhrc_engine.weights import load_pretrained
from uhrc_full.layout import lay_out
from uhrc_full.pool import KVPool

FULL, SWA = ComponentType.FULL, ComponentType.SWA
BUCKETS = Buckets(prefill=(Bucket(1, 64), Bucket(1, 128), Bucket(3, 64)), decode_rows=(1, 4))
CASES = [(1, "llama"), (16, "llama"), (128, "llama"), (16, "deepseek")]
MODELS = {"llama": "llama_gqa_untied", "deepseek": "deepseek_v2_lite"}
CONTEXT, POOL_TOKENS = 512, 2048
IDS = np.random.default_rng(0).integers(0, 64, CONTEXT).astype(np.int32)
OTHER_IDS = IDS[::-1]
NINE = {FULL: np.arange(3)}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The checkpoints, by family."""
    return {
        family: load_pretrained(tiny.write_checkpoint(tmp_path_factory.mktemp(family), name))
        for family, name in MODELS.items()
    }


@pytest.fixture(scope="module")
def runners(loaded):
    """One runner per case."""
    return {
        (page_size, family): make_runner(loaded[family], page_size) for page_size, family in CASES
    }


@pytest.fixture
def llama16(runners):
    return runners[16, "llama"]


def make_runner(loaded, page_size: int, max_pages: int | None = None) -> Runner:
    shapes = [layer.shape for layer in loaded.model.layer_caches]
    pool = KVPool(lay_out(shapes, page_size=page_size, num_tokens=POOL_TOKENS))
    max_pages = max_pages or CONTEXT // page_size
    runner = Runner(loaded.model, loaded.params, {FULL: pool}, BUCKETS, max_pages=max_pages)
    runner.page_size = page_size  # for this file's helpers
    return runner


def place(page_size: int, seed: int) -> dict[ComponentType, np.ndarray]:
    """Page table of a sequence over scattered pages; different seeds share no page."""
    pages = np.arange(POOL_TOKENS // page_size).reshape(-1, CONTEXT // page_size)[seed]
    return {FULL: np.random.default_rng(seed).permutation(pages).astype(np.int32)}


def step(runner: Runner, rows: list[StepRow], width: int) -> np.ndarray:
    inputs = make_step_inputs(
        rows, width=width, max_pages=runner.max_pages, page_size=runner.page_size
    )
    return np.asarray(runner.step(inputs))


def prefill(
    runner: Runner, kv: dict[ComponentType, np.ndarray], cuts: tuple[int, ...], width: int = 64
) -> np.ndarray:
    """Logits after the last chunk of IDS cut at `cuts`."""
    for start, end in pairwise(cuts):
        logits = step(runner, [StepRow(IDS[start:end], start, kv)], width)[0]
    return logits


@pytest.mark.parametrize("case", CASES)
def test_a_cached_prefix_gives_the_same_bits_as_computing_it(runners, case):
    """The prefix was computed earlier, by another request, in the same chunks."""
    runner, page_size = runners[case], case[0]
    scratch = prefill(runner, place(page_size, 0), (0, 64, 128, 192, 250))
    shared = place(page_size, 1)
    prefill(runner, shared, (0, 64, 128))
    step(runner, [StepRow(OTHER_IDS[:64], 0, place(page_size, 2))], 64)
    np.testing.assert_array_equal(prefill(runner, shared, (128, 192, 250)), scratch)


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_same_bits_alone_and_among_others(runners, case):
    runner, page_size = runners[case], case[0]
    prefill(runner, place(page_size, 0), (0, 64))
    alone = prefill(runner, place(page_size, 0), (64, 100))
    rows = [
        StepRow(OTHER_IDS[:64], 0, place(page_size, 2)),
        StepRow(IDS[64:100], 64, place(page_size, 0)),
        StepRow(OTHER_IDS[:7], 0, place(page_size, 3)),
    ]
    np.testing.assert_array_equal(step(runner, rows, 64)[1], alone)


@pytest.mark.parametrize("case", CASES)
def test_the_bucket_does_not_change_the_bits(runners, case):
    runner, kv = runners[case], place(case[0], 0)
    narrow = prefill(runner, kv, (0, 50), width=64)
    np.testing.assert_array_equal(prefill(runner, kv, (0, 50), width=128), narrow)


def test_prefill_uses_no_kernels_that_the_processor_chooses(llama16):
    """On a processor without AVX-512 their choice would change bits with the step's shape."""
    for bucket in llama16.buckets.prefill:
        program = llama16.program(bucket).as_text()
        assert "dot(" in program and "ynn" not in program


def test_the_width_of_the_page_table_does_not_change_the_bits(loaded, llama16):
    wide = make_runner(loaded["llama"], 16, max_pages=77)
    expected = prefill(llama16, place(16, 0), (0, 64, 128))
    np.testing.assert_array_equal(prefill(wide, place(16, 0), (0, 64, 128)), expected)


@pytest.mark.parametrize("case", CASES)
def test_decode_continues_a_prefill(runners, case):
    """Decoding token by token agrees with one prefill of everything, in any batch position."""
    runner, page_size = runners[case], case[0]
    kv = place(page_size, 0)
    expected = prefill(runner, place(page_size, 1), (0, 64, 72))
    prefill(runner, kv, (0, 64))
    for position in range(64, 72):
        rows = [StepRow([IDS[position]], position, kv)]
        if position % 2:
            rows.insert(0, StepRow([5], 0, place(page_size, 2)))
        logits = step(runner, rows, 1)[len(rows) - 1]
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_only_the_new_tokens_are_written(llama16):
    runner = llama16
    pool = runner.pools[FULL]
    pool.replace(jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), pool.buffers))
    kv = place(16, 0)
    prefill(runner, kv, (0, 37))
    step(runner, [StepRow(IDS[37:38], 37, kv), StepRow(IDS[:1], 0, place(16, 1))], 1)
    first = token_indices(kv[FULL], 38, 16).tolist()
    written = {*first, *token_indices(place(16, 1)[FULL], 1, 16).tolist()}
    for arrays in pool.read(np.arange(POOL_TOKENS)):
        for array in arrays:
            filled = ~np.isnan(array).any(axis=(1, 2))
            assert set(np.flatnonzero(filled).tolist()) == written


def test_warmup_compiles_everything_and_writes_nothing(loaded):
    runner = make_runner(loaded["llama"], 16)
    runner.buckets = Buckets(prefill=(Bucket(1, 64),), decode_rows=(1, 4))
    buffers = runner.pools[FULL].buffers
    runner.warmup()
    assert runner.pools[FULL].buffers is buffers
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(buffers))
    del buffers
    assert runner.compile_count == 3
    for count, width in ((1, 64), (1, 2), (1, 1), (3, 1)):
        rows = [StepRow(IDS[: min(width, 5)], 0, place(16, i)) for i in range(count)]
        step(runner, rows, width)
    assert runner.compile_count == 3


@pytest.mark.parametrize("bucket", [Bucket(1, 128), Bucket(4, 1)])
def test_the_pools_are_updated_in_place(llama16, bucket):
    """Every pool byte is aliased, no temporary is as large as one layer's pool, pointers stay."""
    runner = llama16
    pool = runner.pools[FULL]
    memory = runner.program(bucket).memory_analysis()
    layer_bytes = pool.layout.layers[0][0].num_bytes
    assert memory.alias_size_in_bytes == pool.layout.total_bytes
    copies = [
        line
        for line in runner.program(bucket).as_text().splitlines()
        if " copy(" in line and f"f32[{POOL_TOKENS // 16},16,2,8]" in line.split(" copy(")[0]
    ]
    assert copies == []
    assert memory.temp_size_in_bytes < 8 * layer_bytes
    before = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(pool.buffers)]
    step(runner, [StepRow(IDS[: bucket.width], 0, place(16, 0))], bucket.width)
    assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(pool.buffers)] == before


@pytest.mark.parametrize(
    ("rows", "width", "bucket"),
    [
        (1, 1, (1, 1)),
        (2, 1, (4, 1)),
        (1, 2, (1, 64)),
        (1, 65, (1, 128)),
        (2, 64, (3, 64)),
    ],
)
def test_the_cheapest_bucket_that_fits_is_taken(llama16, rows, width, bucket):
    assert llama16.bucket_for(rows, width) == bucket


def test_a_step_no_bucket_holds_is_refused(llama16):
    with pytest.raises(ValueError, match=r"no bucket holds a step of 5 rows x 1 tokens; there are"):
        llama16.bucket_for(5, 1)


def test_a_prefill_bucket_below_64_token_rows_is_refused():
    with pytest.raises(ValueError, match=r"prefill bucket \(1, 32\) has fewer than 64 token rows"):
        Buckets(prefill=(Bucket(1, 32),))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (StepRow([], 0, NINE), "row 0 has 0 new tokens; this step takes 1 to 4"),
        (StepRow([1] * 5, 0, NINE), "row 0 has 5 new tokens"),
        (
            StepRow([1] * 4, 4, {FULL: [4]}),
            r"row 0: 1 pages \(FULL\) for 8 tokens",
        ),
        (StepRow([1], 8, NINE), "row 0 needs 3 pages; the page table holds 2"),
        (
            StepRow([1], 1, {SWA: [-1, -1]}),
            "row 0: a new token has no place in the SWA",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        make_step_inputs([row], width=4, max_pages=2, page_size=4)


def test_padding_rows_and_columns_write_no_token_and_no_state():
    rows = [StepRow([7, 8], 0, {FULL: np.arange(1)}, state_slot=3, track_slot=5)]
    inputs = make_step_inputs(rows, width=2, max_pages=1, page_size=4)
    padded = pad_inputs(inputs, Bucket(3, 4), max_pages=2)
    np.testing.assert_array_equal(padded.state_slots, [3, PADDING_INDEX, PADDING_INDEX])
    np.testing.assert_array_equal(padded.track_slots, [5, PADDING_INDEX, PADDING_INDEX])
    nowhere = [PADDING_INDEX] * 4
    np.testing.assert_array_equal(
        padded.places[FULL].write_indices,
        [[0, 1, PADDING_INDEX, PADDING_INDEX], nowhere, nowhere],
    )
    assert (padded.kv_lens.tolist(), padded.q_lens.tolist()) == ([2, 0, 0], [2, 0, 0])


def test_step_inputs_describe_the_rows():
    kv = {FULL: np.array([2, 1], np.int32)}
    inputs = make_step_inputs([StepRow([7, 8], 4, kv)], width=3, max_pages=3, page_size=4)
    assert isinstance(inputs, StepInputs)
    np.testing.assert_array_equal(inputs.token_ids, [[7, 8, 0]])
    np.testing.assert_array_equal(inputs.positions, [[4, 5, 0]])
    np.testing.assert_array_equal(
        inputs.places[FULL].write_indices, [[4, 5, np.iinfo(np.int32).max]]
    )
    np.testing.assert_array_equal(inputs.places[FULL].page_table, [[2, 1, 0]])
    assert (inputs.kv_lens.tolist(), inputs.q_lens.tolist()) == ([6], [2])


def test_pages_that_have_left_the_window_are_entry_0_and_the_others_stay():
    kv = {FULL: np.arange(3), SWA: np.array([-1, 10, 3])}
    places = make_step_inputs([StepRow([7, 8], 9, kv)], width=2, max_pages=4, page_size=4).places
    np.testing.assert_array_equal(places[FULL].page_table, [[0, 1, 2, 0]])
    np.testing.assert_array_equal(places[SWA].page_table, [[0, 10, 3, 0]])
    np.testing.assert_array_equal(places[SWA].write_indices, [[13, 14]])
