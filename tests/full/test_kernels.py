"""The FULL kernels. Each test runs every registered implementation on each page size and layout."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.full.paged_rows import GQA, MLA, SCALE, PagedRows
from uhrc_full.kernels import Kernel
from uhrc_full.kernels.attention import BLOCK_TOKENS, PAGED_ATTENTION, paged_attention
from uhrc_full.kernels.kv_update import KV_UPDATE, kv_update
from uhrc_full.kernels.mla import MLA_ATTENTION, mla_attention

PAGE_SIZES = (1, 16, 128)
HEADS = 6


def attend(batch, kernel, q, implementation, **more):
    call = partial(kernel, scale=SCALE, implementation=implementation, **more)
    return batch.attend(call, q, layer=0 if kernel is paged_attention else 1)


def lens_around(page_size):
    """(kv_len, q_len) rows: prefill from nothing, after a cached prefix, decode, page edges."""
    edge = max(page_size, 4)
    return [
        (edge - 1, edge - 1),
        (edge, edge),
        (edge + 1, 1),
        (2 * edge, edge),
        (BLOCK_TOKENS + 1, 5),
        (1, 1),
    ]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("implementation", PAGED_ATTENTION.implementations)
def test_paged_attention_is_causal_softmax_attention(implementation, page_size, platform):
    batch = PagedRows(page_size, lens_around(page_size), platform=platform)
    q = batch.queries(HEADS, GQA.head_dim)
    batch.check_gqa(attend(batch, paged_attention, q, implementation), q)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("implementation", PAGED_ATTENTION.implementations)
def test_a_sink_takes_its_part_of_the_softmax_and_brings_no_value(implementation, platform):
    """From a sink that outweighs everything to one that weighs nothing."""
    batch = PagedRows(16, [*lens_around(16), (0, 0)], platform=platform)
    q = batch.queries(HEADS, GQA.head_dim)
    sinks = np.array([40, 3, 0, -2, -90, 1], np.float32)
    out = attend(batch, paged_attention, q, implementation, sinks=sinks)
    batch.check_gqa(out, q, sinks)
    np.testing.assert_array_equal(out[-1], 0)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("implementation", MLA_ATTENTION.implementations)
def test_mla_attention_reads_one_latent_as_key_and_value(implementation, page_size, platform):
    batch = PagedRows(page_size, lens_around(page_size), platform=platform)
    q = batch.queries(HEADS, MLA.latent_dim)
    out = attend(batch, mla_attention, q, implementation)
    for r, new in enumerate(batch.q_lens):
        k = np.repeat(batch.rows[r][2][:, None], HEADS, axis=1)
        expected = batch.expected(r, q[r], k, k[..., : MLA.kv_lora_rank])
        np.testing.assert_allclose(out[r, :new], expected, atol=3e-6)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("kernel", [paged_attention, mla_attention])
def test_xla_rows_do_not_depend_on_the_batch_or_the_table_width(kernel):
    """Alone, beside a row that is five blocks longer, and with a wider table: the same bits."""
    dim = GQA.head_dim if kernel is paged_attention else MLA.latent_dim
    alone = PagedRows(16, [(100, 64)])
    wide = PagedRows(16, [(100, 64)], table_pages=44)
    beside = PagedRows(16, [(100, 64), (5 * BLOCK_TOKENS + 3, 64), (64, 64)])
    out, *others = (
        attend(batch, kernel, batch.queries(HEADS, dim), "xla")[0]
        for batch in (alone, wide, beside)
    )
    for other in others:
        np.testing.assert_array_equal(out, other)


@pytest.mark.parametrize("implementation", PAGED_ATTENTION.implementations)
@pytest.mark.parametrize("kernel", [paged_attention, mla_attention])
def test_a_row_without_tokens_gives_zeros(kernel, implementation):
    dim = GQA.head_dim if kernel is paged_attention else MLA.latent_dim
    batch = PagedRows(16, [(0, 0), (20, 4)])
    out = attend(batch, kernel, batch.queries(HEADS, dim), implementation)
    np.testing.assert_array_equal(out[0], 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("implementation", KV_UPDATE.implementations)
def test_kv_update_writes_its_tokens_and_nothing_else(implementation, page_size):
    num_tokens = 4 * page_size
    pool = jnp.full((4, page_size, 2, 8), jnp.nan)
    padding = [num_tokens, -1, np.iinfo(np.int32).max, np.iinfo(np.int32).min]
    real = [num_tokens - 1, 0, page_size]
    rows = np.random.default_rng(0).standard_normal((7, 2, 8)).astype(np.float32)
    indices = np.array([padding[0], real[0], *padding[1:3], real[1], padding[3], real[2]], np.int32)
    update = jax.jit(partial(kv_update, implementation=implementation))
    out = np.asarray(update(pool, rows, indices)).reshape(num_tokens, 2, 8)
    np.testing.assert_array_equal(out[real], rows[[1, 4, 6]])
    assert np.isnan(np.delete(out, real, axis=0)).all()


def test_kv_update_is_in_place_when_donated():
    pool = jax.ShapeDtypeStruct((256, 16, 4, 64), jnp.float32)
    rows, indices = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32), np.arange(8, dtype=np.int32)
    memory = jax.jit(kv_update, donate_argnums=0).lower(pool, rows, indices).compile()
    analysis = memory.memory_analysis()
    assert analysis.alias_size_in_bytes == 256 * 16 * 4 * 64 * 4
    assert analysis.temp_size_in_bytes < 64 * 1024


def test_an_unknown_implementation_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'cuda'; registered: reference, xla"):
        PAGED_ATTENTION.pick("cuda")


def test_an_implementation_is_registered_once():
    kernel = Kernel("twice")
    kernel.register("xla")(lambda: None)
    with pytest.raises(ValueError, match="kernel twice already has xla"):
        kernel.register("xla")
