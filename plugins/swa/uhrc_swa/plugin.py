"""What uhrc-swa declares: the SWA component, and the models with sliding-window layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from uhrc_core.plugin_api import (
    ComponentContext,
    ComponentSpec,
    ComponentType,
    LayerKind,
    PoolPlan,
    SWATokenToKVPoolAllocator,
    hookimpl,
)
from uhrc_full import layout
from uhrc_full.planning import kv_layout
from uhrc_swa.model_layers import window_layers
from uhrc_swa.params import SWAParams

if TYPE_CHECKING:
    from uhrc_full.pool import KVPool
    from uhrc_swa.component import SWAComponent

UHRC_API = (1, 0)

_IMPLEMENTATIONS = ("reference", "xla")


@hookimpl
def uhrc_component_specs() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind=ComponentType.SWA,
            name="swa",
            params_model=SWAParams,
            eviction_priority=1,
            make_component=make_component,
            plan_pool=plan_pool,
            make_device_pool=make_device_pool,
            kernels={"window_attention": _IMPLEMENTATIONS},
        )
    ]


@hookimpl
def uhrc_layer_kinds(hf_config: Mapping[str, Any]) -> tuple[LayerKind, ...] | None:
    return window_layers(hf_config)


def make_component(params: SWAParams, context: ComponentContext) -> SWAComponent:
    """The control plane: tree component, index allocator and full-to-SWA map."""
    from uhrc_swa.component import SWAComponent

    assert params.num_tokens is not None and context.full_allocator is not None
    plan = params.plan(context.page_size)
    allocator = SWATokenToKVPoolAllocator(
        params.num_tokens, context.full_allocator, plan.window_tokens
    )
    return SWAComponent(allocator, context.policy, context.eviction_priority, plan)


def plan_pool(
    params: SWAParams, context: ComponentContext, layers: Sequence[LayerKind]
) -> PoolPlan:
    """The buffers of the KV pool of the window layers."""
    return _layout(params, context, layers).plan


def make_device_pool(
    params: SWAParams, context: ComponentContext, layers: Sequence[LayerKind], mesh: Any = None
) -> KVPool:
    """Allocates the KV pool; over ``mesh`` (axes "data", "tensor") if there is one. Imports jax."""
    from uhrc_full.pool import KVPool

    return KVPool(_layout(params, context, layers), mesh)


def _layout(
    params: SWAParams, context: ComponentContext, layers: Sequence[LayerKind]
) -> layout.KVLayout:
    shapes = [
        layout.GQAShape(layer.shape["num_kv_heads"], layer.shape["head_dim"]) for layer in layers
    ]
    return kv_layout(shapes, params, context)
