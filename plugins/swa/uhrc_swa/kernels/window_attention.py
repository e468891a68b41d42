"""Causal attention that sees a window, over a paged KV pool: prefill and decode in one form.

Full attention with a near edge: the forms are those of `uhrc_full.kernels.attention`, told how far
back a token sees. The `xla` form starts at each row's first block in view, so that a step costs
what the window and the new tokens cost, however long the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from uhrc_full.kernels.attention import PagedView, gqa_reference, gqa_xla, sink_logits
from uhrc_swa.kernels import Kernel

if TYPE_CHECKING:
    from uhrc_full.pool import KVLayer

WINDOW_ATTENTION = Kernel("window_attention")
"""Implementations take what those of `PAGED_ATTENTION` take; the view holds the window."""
WINDOW_ATTENTION.register("reference")(gqa_reference)
WINDOW_ATTENTION.register("xla")(gqa_xla)


def window_attention(
    q: jax.Array,
    cache: KVLayer,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    *,
    scale: float,
    window_tokens: int,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(scale * q k^T) v for every new token over the last `window_tokens` of its row.

    A new token at position p sees positions max(0, p - window_tokens + 1) .. p: itself counts, as
    in Hugging Face's `sliding_window`.
    q, cache, page_table, kv_lens, q_lens, sinks and the result: as in `paged_attention`; positions
    are those of the whole sequence, and page p of a row holds its positions from p * page_size on.
    Pool tokens that no new token sees are never read as data (they may be NaN); a page table entry
    wholly before the window of the row's first new token, or beyond its end, may hold anything (a
    freed page, 0). The `xla` form never follows it.
    Raises ValueError when window_tokens < 1.
    """
    if window_tokens < 1:
        raise ValueError(f"window_tokens = {window_tokens}: a token sees itself at least")
    view = PagedView(page_table, kv_lens, q_lens, q.shape[1], window_tokens)
    return WINDOW_ATTENTION.pick(implementation)(q, cache, view, scale, sink_logits(sinks, q))
