"""Rows of a step over scattered pages of a pool that is NaN wherever nothing is seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_full.layout import GQAShape, MLAShape, lay_out
from uhrc_full.pool import KVPool

GQA, MLA = GQAShape(2, 32), MLAShape(24, 8)
SCALE = 0.2
EVERYTHING = 1 << 20
SPARE_PAGES = 3


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class PagedRows:
    """Rows of given (kv_len, q_len). What lies before the window of a row's first new token was
    never written, and the page table has a freed page there, as it has beyond the row's end."""

    def __init__(
        self, page_size, lens, *, gqa=GQA, window=EVERYTHING, platform="cpu", table_pages=0
    ):
        rng = np.random.default_rng(len(lens))
        self.kv_lens, self.q_lens = np.array(lens, np.int32).T
        self.width, self.window = max(self.q_lens), window
        firsts = np.maximum(self.kv_lens - self.q_lens + 1 - window, 0)
        ends = -(-self.kv_lens // page_size)
        num_pages = ends.sum() + SPARE_PAGES
        plan = lay_out(
            [gqa, MLA], page_size=page_size, num_tokens=num_pages * page_size, platform=platform
        )
        self.pool = KVPool(plan)
        self.pool.replace(jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), self.pool.buffers))
        pages = iter(rng.permutation(num_pages))
        freed = [next(pages) for _ in range(SPARE_PAGES)]
        table = rng.choice(freed, (len(lens), max(*ends, table_pages)))
        self.page_table = table.astype(np.int32)
        self.rows, tokens = [], []
        for r, (first, kv, end) in enumerate(zip(firsts, self.kv_lens, ends, strict=True)):
            seen = range(first // page_size, end)
            self.page_table[r, seen] = [next(pages) for _ in seen]
            at = np.arange(first, kv)
            tokens.append(self.page_table[r, at // page_size] * page_size + at % page_size)
            # A token's data depends on its row and position alone, so that batches can share rows.
            shapes = ((gqa.kv_heads, gqa.head_dim),) * 2 + ((MLA.latent_dim,),)
            self.rows.append([normal((r, i), kv, *shape) for i, shape in enumerate(shapes)])
        written = [[x[f:] for x in row] for f, row in zip(firsts, self.rows, strict=True)]
        k, v, latent = map(np.concatenate, zip(*written, strict=True))
        self.pool.write(np.concatenate(tokens), ((k, v), (latent,)))

    def queries(self, heads, dim):
        """float32[R, W, heads, dim]: a row's are the same in every batch of this width."""
        rows = [normal((r, 9), self.width, heads, dim) for r in range(len(self.kv_lens))]
        return np.stack(rows)

    def attend(self, kernel, q, layer=0):
        """`kernel(q, cache, page_table, kv_lens, q_lens)`, jitted, on this pool's layer."""
        cache = self.pool.buffers[layer]
        return np.asarray(jax.jit(kernel)(q, cache, self.page_table, self.kv_lens, self.q_lens))

    def expected(self, row, q, k, v, sinks=None):
        """float64, one token and head at a time: q [W, heads, d], k [kv, heads, d], v likewise."""
        kv, new, heads = self.kv_lens[row], self.q_lens[row], q.shape[1]
        out = np.zeros((new, heads, v.shape[-1]))
        for w in range(new):
            position = kv - new + w
            seen = slice(max(0, position - self.window + 1), position + 1)
            for h in range(heads):
                scores = k[seen, h].astype(np.float64) @ q[w, h] * SCALE
                top = scores.max()
                weights = np.exp(scores - top)
                rest = 0 if sinks is None else np.exp(sinks[h] - top)
                out[w, h] = weights @ v[seen, h] / (weights.sum() + rest)
        return out

    def check_gqa(self, out, q, sinks=None):
        """`out` is attention over the rows' keys and values, and finite in its padding too."""
        for r, new in enumerate(self.q_lens):
            k, v = (np.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in self.rows[r][:2])
            expected = self.expected(r, q[r], k, v, sinks)
            np.testing.assert_allclose(out[r, :new], expected, atol=3e-6, err_msg=f"row {r}")
        assert np.isfinite(out).all()
