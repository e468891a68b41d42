"""The FULL kernels. Each test runs every registered implementation on each page size and layout."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_full.kernels import Kernel
from uhrc_full.kernels.attention import BLOCK_TOKENS, PAGED_ATTENTION, paged_attention
from uhrc_full.kernels.kv_update import KV_UPDATE, kv_update
from uhrc_full.kernels.mla import MLA_ATTENTION, mla_attention
from uhrc_full.layout import GQAShape, MLAShape, plan_pool
from uhrc_full.pool import KVPool

PAGE_SIZES = (1, 16, 128)
HEADS, GQA, MLA = 6, GQAShape(2, 32), MLAShape(24, 8)


class Batch:
    """Rows of given (kv_len, q_len), their pages scattered over a pool that is NaN elsewhere."""

    def __init__(self, page_size, lens, platform="cpu", spare_pages=0):
        self.rng = np.random.default_rng(0)
        self.kv_lens, self.q_lens = np.array(lens, np.int32).T
        pages = [-(-kv // page_size) for kv in self.kv_lens]
        num_pages = sum(pages) + 3
        plan = plan_pool(
            [GQA, MLA], page_size=page_size, num_tokens=num_pages * page_size, platform=platform
        )
        self.pool = KVPool(plan)
        self.pool.replace(jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), self.pool.buffers))
        order = iter(self.rng.permutation(num_pages))
        self.page_table = np.zeros((len(lens), max(pages) + spare_pages), np.int32)
        self.keys, self.values, self.latents, tokens = [], [], [], []
        for r, (kv, used) in enumerate(zip(self.kv_lens, pages, strict=True)):
            self.page_table[r, :used] = [next(order) for _ in range(used)]
            in_pages = self.page_table[r, :used, None] * page_size + np.arange(page_size)
            tokens.append(in_pages.ravel()[:kv])
            # A row's data depends on its number alone, so that batches can share a row.
            rng = np.random.default_rng(r + 1)
            k, v = rng.standard_normal((2, kv, GQA.kv_heads, GQA.head_dim), np.float32)
            latent = rng.standard_normal((kv, MLA.latent_dim), np.float32)
            self.keys.append(k)
            self.values.append(v)
            self.latents.append(latent)
        k, v, latent = map(np.concatenate, (self.keys, self.values, self.latents))
        self.pool.write(np.concatenate(tokens), ((k, v), (latent,)))
        self.width = max(self.q_lens)

    def normal(self, *shape):
        return self.rng.standard_normal(shape, np.float32)

    def attend(self, kernel, q, implementation):
        """The kernel, jitted, on this batch's pool."""
        layer = self.pool.buffers[0 if kernel is paged_attention else 1]
        call = jax.jit(partial(kernel, scale=0.2, implementation=implementation))
        return np.asarray(call(q, layer, self.page_table, self.kv_lens, self.q_lens))

    def expected(self, row, q, k, v):
        """float64 attention of one row: q [W, heads, d], k [kv, heads, d], v [kv, heads, dv]."""
        kv, new = self.kv_lens[row], self.q_lens[row]
        scores = np.einsum("whd,shd->hws", q[:new].astype(np.float64), k) * 0.2
        hidden = np.arange(kv) > (kv - new + np.arange(new))[:, None]
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hws,shd->whd", weights / weights.sum(-1, keepdims=True), v)


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
    batch = Batch(page_size, lens_around(page_size), platform)
    q = batch.normal(len(batch.kv_lens), batch.width, HEADS, GQA.head_dim)
    out = batch.attend(paged_attention, q, implementation)
    group = HEADS // GQA.kv_heads
    for r, new in enumerate(batch.q_lens):
        k, v = (np.repeat(x[r], group, axis=1) for x in (batch.keys, batch.values))
        np.testing.assert_allclose(out[r, :new], batch.expected(r, q[r], k, v), atol=3e-6)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("implementation", MLA_ATTENTION.implementations)
def test_mla_attention_reads_one_latent_as_key_and_value(implementation, page_size, platform):
    batch = Batch(page_size, lens_around(page_size), platform)
    q = batch.normal(len(batch.kv_lens), batch.width, HEADS, MLA.latent_dim)
    out = batch.attend(mla_attention, q, implementation)
    for r, new in enumerate(batch.q_lens):
        k = np.repeat(batch.latents[r][:, None], HEADS, axis=1)
        expected = batch.expected(r, q[r], k, k[..., : MLA.kv_lora_rank])
        np.testing.assert_allclose(out[r, :new], expected, atol=3e-6)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("kernel", [paged_attention, mla_attention])
def test_xla_rows_do_not_depend_on_the_batch_or_the_table_width(kernel):
    """Alone, beside a row that is five blocks longer, and with a wider table: the same bits."""
    dim = GQA.head_dim if kernel is paged_attention else MLA.latent_dim
    alone = Batch(16, [(100, 64)])
    wide = Batch(16, [(100, 64)], spare_pages=37)
    beside = Batch(16, [(100, 64), (5 * BLOCK_TOKENS + 3, 64), (64, 64)])
    q = alone.normal(1, 64, HEADS, dim)
    q3 = np.concatenate([q, beside.normal(2, 64, HEADS, dim)])
    out = alone.attend(kernel, q, "xla")[0]
    np.testing.assert_array_equal(out, wide.attend(kernel, q, "xla")[0])
    np.testing.assert_array_equal(out, beside.attend(kernel, q3, "xla")[0])


@pytest.mark.parametrize("kernel", [paged_attention, mla_attention])
def test_a_row_without_tokens_gives_finite_numbers(kernel):
    dim = GQA.head_dim if kernel is paged_attention else MLA.latent_dim
    batch = Batch(16, [(0, 0), (20, 4)])
    out = batch.attend(kernel, batch.normal(2, 4, HEADS, dim), "xla")
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
