"""A model's two KV pools, one for its full layers and one for its window layers, in one step."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from tests.full.paged_rows import normal
from uhrc_full.kernels.attention import paged_attention
from uhrc_full.layout import GQAShape, lay_out
from uhrc_full.pool import KVPool
from uhrc_swa.kernels.window_attention import window_attention

SHAPE, PAGE_SIZE, WINDOW = GQAShape(2, 64), 16, 64
FULL_TOKENS, SWA_TOKENS = 4096, 1024


def pool_pair(platform: str) -> dict[str, KVPool]:
    sizes = {"full": FULL_TOKENS, "swa": SWA_TOKENS}
    return {
        name: KVPool(lay_out([SHAPE] * 2, page_size=PAGE_SIZE, num_tokens=size, platform=platform))
        for name, size in sizes.items()
    }


@partial(jax.jit, donate_argnums=0)
def step(buffers, tables, kv_lens, tokens):
    """One new token a row through two layers of each kind; tokens are int32[R] places by pool."""
    attends = {
        "full": partial(paged_attention, scale=0.1),
        "swa": partial(window_attention, scale=0.1, window_tokens=WINDOW),
    }
    x = kv_lens[:, None, None] * np.ones((SHAPE.kv_heads, SHAPE.head_dim), np.float32)
    written = {name: [] for name in buffers}
    for layer in range(2):
        for name, attend in attends.items():
            cache = buffers[name][layer].write(x, x + 1, tokens[name])
            q_lens = (kv_lens > 0).astype(np.int32)
            x = attend(x[:, None], cache, tables[name], kv_lens, q_lens)[:, 0]
            written[name].append(cache)
    return {name: tuple(caches) for name, caches in written.items()}, x


def inputs():
    """Two rows of 1000 and 70 tokens; the window pool holds the last 5 pages of the first row."""
    kv_lens = np.array([1000, 70], np.int32)
    full = np.zeros((2, 63), np.int32)
    full[0], full[1, :5] = np.arange(63), 63 + np.arange(5)
    swa = np.zeros((2, 63), np.int32)
    swa[0, 58:], swa[1, :5] = 7 + np.arange(5), 20 + np.arange(5)
    tables = {"full": full, "swa": swa}
    last = kv_lens - 1
    tokens = {
        name: table[range(2), last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
        for name, table in tables.items()
    }
    return tables, kv_lens, tokens


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_step_writes_both_pools_in_place_when_donated(platform):
    pools = pool_pair(platform)
    buffers = {name: pool.buffers for name, pool in pools.items()}
    memory = step.lower(buffers, *inputs()).compile().memory_analysis()
    both = sum(pool.layout.total_bytes for pool in pools.values())
    smallest = min(spec.num_bytes for spec in pools["swa"].layout.buffers)
    assert memory.alias_size_in_bytes == both
    assert memory.temp_size_in_bytes < smallest
    before = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(buffers)]
    after, _ = step(buffers, *inputs())
    assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(after)] == before


def test_a_step_leaves_every_other_token_as_it_was():
    pools, (tables, kv_lens, tokens) = pool_pair("cpu"), inputs()
    for seed, pool in enumerate(pools.values()):
        n, shape = pool.layout.num_units, (SHAPE.kv_heads, SHAPE.head_dim)
        layers = [tuple(normal((seed, i, j), n, *shape) for j in range(2)) for i in range(2)]
        pool.write(np.arange(n), tuple(layers))
    before = {name: pool.read(np.arange(pool.layout.num_units)) for name, pool in pools.items()}
    after, _ = step({name: pool.buffers for name, pool in pools.items()}, tables, kv_lens, tokens)
    for name, pool in pools.items():
        pool.replace(after[name])
        now = pool.read(np.arange(pool.layout.num_units))
        for was, is_now in zip(before[name], now, strict=True):
            for a, b in zip(was, is_now, strict=True):
                changed = np.flatnonzero((a != b).any(axis=(1, 2)))
                np.testing.assert_array_equal(changed, np.sort(tokens[name]))
