"""From a table and a model's layers to a laid-out KV pool; for window layers' pools as well."""

from __future__ import annotations

from collections.abc import Sequence

from uhrc_core.plugin_api import BufferPlan, ComponentContext, PoolPlan
from uhrc_full import layout
from uhrc_full.params import KVPoolParams


def lay_out(
    shapes: Sequence[layout.LayerShape], params: KVPoolParams, context: ComponentContext
) -> layout.PoolPlan:
    """A pool of ``params.num_tokens`` tokens per dp rank for layers of these shapes."""
    assert params.num_tokens is not None
    return layout.plan_pool(
        shapes,
        page_size=context.page_size,
        num_tokens=params.num_tokens,
        dp_size=context.dp_size,
        dtype=params.dtype,
        platform=params.platform,
    )


def buffers_of(plan: layout.PoolPlan) -> PoolPlan:
    """What the core needs to know of a laid-out pool."""
    buffers = (
        BufferPlan(f"layer{spec.layer}.{spec.name}", spec.shape, spec.dtype)
        for spec in plan.buffers
    )
    return PoolPlan(tuple(buffers), plan.num_tokens)
