"""Window attention, in every implementation, over pools that are NaN outside the windows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from tests.full.paged_rows import SCALE, PagedRows
from uhrc_full.kernels.attention import BLOCK_TOKENS, paged_attention
from uhrc_full.layout import GQAShape
from uhrc_swa.kernels.window_attention import WINDOW_ATTENTION, window_attention

CHUNK = 16
HEADS, DIM = 4, 8
MHA, GQA, MQA = (GQAShape(kv_heads, DIM) for kv_heads in (4, 2, 1))


def attend(batch, q, implementation="xla", **more):
    call = partial(
        window_attention, scale=SCALE, window_tokens=batch.window, implementation=implementation
    )
    return batch.attend(partial(call, **more), q)


def lens_of_every_residue():
    """(kv_len, q_len) rows: chunks behind prefixes of every length modulo 16, prompts of less than
    a chunk and of many windows, decode, a row of padding."""
    prefixes = [BLOCK_TOKENS - 60 + 17 * r for r in range(16)]
    behind = [(prefix + 1 + r % CHUNK, 1 + r % CHUNK) for r, prefix in enumerate(prefixes)]
    assert {prefix % 16 for prefix in prefixes} == set(range(16))
    return [*behind, (CHUNK, CHUNK), (5, 5), (1, 1), (2, 1), (16, 1), (300, 1), (0, 0)]


# Shorter than, equal to and longer than a page, a chunk, a block of the loop and a prompt.
@pytest.mark.parametrize("window", [1, 3, 4, 16, 50, BLOCK_TOKENS, 1000])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("implementation", WINDOW_ATTENTION.implementations)
def test_a_token_sees_itself_and_the_rest_of_its_window(implementation, page_size, window):
    batch = PagedRows(page_size, lens_of_every_residue(), gqa=GQA, window=window)
    q = batch.queries(HEADS, DIM)
    batch.check_gqa(attend(batch, q, implementation), q)


@pytest.mark.parametrize("sinks", [None, np.array([30, 1, -2, -80], np.float32)])
@pytest.mark.parametrize("gqa", [MHA, GQA, MQA])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("implementation", WINDOW_ATTENTION.implementations)
def test_heads_share_keys_and_each_has_its_sink(implementation, platform, gqa, sinks):
    lens = [(200, 16), (130, 1), (16, 16), (3, 2), (0, 0)]
    batch = PagedRows(4, lens, gqa=gqa, window=20, platform=platform)
    q = batch.queries(HEADS, DIM)
    out = attend(batch, q, implementation, sinks=sinks)
    batch.check_gqa(out, q, sinks)
    np.testing.assert_array_equal(out[-1], 0)


@pytest.mark.parametrize("width", [1, 64])
def test_xla_rows_do_not_depend_on_the_batch_or_the_table_width(width):
    """Alone, with a wider table, beside a longer row whose window starts elsewhere: same bits."""
    row, others = (500, width), [(1100, width), (width, width)]
    alone = PagedRows(16, [row], gqa=GQA, window=200)
    wide = PagedRows(16, [row], gqa=GQA, window=200, table_pages=90)
    beside = PagedRows(16, [row, *others], gqa=GQA, window=200)
    out = attend(alone, alone.queries(HEADS, DIM))[0]
    for batch in (wide, beside):
        np.testing.assert_array_equal(out, attend(batch, batch.queries(HEADS, DIM))[0])


@pytest.mark.parametrize("width", [1, 64])
@pytest.mark.parametrize("end", [256, 300, 470])
def test_a_chunk_has_the_same_bits_whatever_is_left_of_its_prefix(end, width):
    """The whole prefix in the pool, or the window alone and in other pages."""
    kept = PagedRows(16, [(end, width)], gqa=GQA)
    freed = PagedRows(16, [(end, width), (90, width)], gqa=GQA, window=150)
    kept.window = freed.window
    outs = [attend(batch, batch.queries(HEADS, DIM))[0] for batch in (kept, freed)]
    np.testing.assert_array_equal(*outs)


def test_a_token_has_the_same_bits_wherever_its_chunk_begins():
    """Chunks that share 56 tokens, and whose windows start in different blocks of the loop."""
    early, late = (PagedRows(16, [(kv, 64)], gqa=GQA, window=100) for kv in (286, 294))
    firsts = [batch.kv_lens[0] - 64 - (100 - 1) for batch in (early, late)]
    assert [first // BLOCK_TOKENS for first in firsts] == [0, 1]
    q = np.concatenate([early.queries(HEADS, DIM)[:, :8], late.queries(HEADS, DIM)], axis=1)
    np.testing.assert_array_equal(attend(early, q[:, :64])[:, 8:], attend(late, q[:, 8:])[:, :-8])


def test_a_window_that_nothing_leaves_is_full_attention():
    batch = PagedRows(16, [(300, 64), (40, 40)], gqa=GQA)
    q, sinks = batch.queries(HEADS, DIM), np.arange(HEADS, dtype=np.float32)
    full = batch.attend(partial(paged_attention, scale=SCALE, sinks=sinks, implementation="xla"), q)
    np.testing.assert_array_equal(attend(batch, q, sinks=sinks), full)


class WatchedArray:
    """Stands for a pool's array and notes the pages gathered from it, as the program runs."""

    def __init__(self, array):
        self.array, self.gathered = array, []

    def __getitem__(self, pages):
        jax.debug.callback(lambda read: self.gathered.append(np.asarray(read)), pages)
        return self.array[pages]


def pages_read(batch, kernel):
    """int32[R, n]: every read of a page of keys by the `xla` form, repeats included."""
    layer = batch.pool.buffers[0]
    cache = replace(layer, k=WatchedArray(layer.k))
    q = batch.queries(HEADS, DIM)
    call = jax.jit(lambda *rows: kernel(q, cache, *rows, scale=SCALE, implementation="xla"))
    call(batch.page_table, batch.kv_lens, batch.q_lens).block_until_ready()
    jax.effects_barrier()
    return np.concatenate(cache.k.gathered, axis=1)


@pytest.mark.parametrize("window", [1, 40, 300])
def test_xla_reads_the_pages_of_the_window_and_no_other(window):
    lens = [(600, 16), (601, 1), (40, 16), (7, 7)]
    batch = PagedRows(4, lens, gqa=GQA, window=window)
    read = pages_read(batch, partial(window_attention, window_tokens=window))
    for r, (kv, new) in enumerate(lens):
        first_page = max(0, kv - new + 1 - window) // 4
        assert set(read[r]) == set(batch.page_table[r, first_page : -(-kv // 4)])


@pytest.mark.parametrize("width", [1, 16])
def test_the_work_grows_with_the_window_and_not_with_the_context(width):
    """Full attention reads 16 and 512 pages; this window lies within one block of the loop."""
    reads = {window_attention: [], paged_attention: []}
    for pages in (16, 512):
        batch = PagedRows(16, [(16 * pages, width)], gqa=GQA, window=100)
        windowed = partial(window_attention, window_tokens=100)
        reads[window_attention].append(pages_read(batch, windowed).shape[1])
        reads[paged_attention].append(pages_read(batch, paged_attention).shape[1])
    assert reads == {window_attention: [8, 8], paged_attention: [16, 512]}


def test_a_window_without_the_token_itself_is_refused():
    batch = PagedRows(4, [(4, 1)], gqa=GQA, window=1)
    batch.window = 0
    with pytest.raises(ValueError, match="window_tokens = 0: a token sees itself at least"):
        attend(batch, batch.queries(HEADS, DIM))
