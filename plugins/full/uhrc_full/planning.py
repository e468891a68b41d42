"""From a table and a model's layers to a laid-out KV pool; for window layers' pools as well."""

from __future__ import annotations

from collections.abc import Sequence

from uhrc_core.plugin_api import ComponentContext
from uhrc_full.layout import KVLayout, LayerShape, lay_out
from uhrc_full.params import KVPoolParams


def kv_layout(
    shapes: Sequence[LayerShape], params: KVPoolParams, context: ComponentContext
) -> KVLayout:
    """A pool of ``params.num_tokens`` tokens per dp rank for layers of these shapes."""
    assert params.num_tokens is not None
    return lay_out(
        shapes,
        page_size=context.page_size,
        num_tokens=params.num_tokens,
        dp_size=context.dp_size,
        dtype=params.dtype,
        platform=params.platform,
    )
