"""What uhrc-full declares: the FULL component, and the models made of full attention alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from uhrc_core.plugin_api import (
    ComponentContext,
    ComponentSpec,
    ComponentType,
    ConfigError,
    LayerKind,
    PagedTokenToKVPoolAllocator,
    PoolPlan,
    TokenToKVPoolAllocator,
    hookimpl,
)
from uhrc_full import layout
from uhrc_full.model_layers import attention_of, full_layers
from uhrc_full.params import FullParams
from uhrc_full.planning import kv_layout

if TYPE_CHECKING:
    from uhrc_full.component import FullComponent
    from uhrc_full.pool import KVPool

UHRC_API = (1, 0)

_IMPLEMENTATIONS = ("reference", "xla")


@hookimpl
def uhrc_component_specs() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind=ComponentType.FULL,
            name="full",
            params_model=FullParams,
            eviction_priority=2,
            make_component=make_component,
            plan_pool=plan_pool,
            make_device_pool=make_device_pool,
            kernels={
                "kv_update": _IMPLEMENTATIONS,
                "paged_attention": _IMPLEMENTATIONS,
                "mla_attention": _IMPLEMENTATIONS,
            },
        )
    ]


@hookimpl
def uhrc_layer_kinds(hf_config: Mapping[str, Any]) -> tuple[LayerKind, ...] | None:
    return full_layers(hf_config)


def make_component(params: FullParams, context: ComponentContext) -> FullComponent:
    """The control plane: tree component and index allocator."""
    from uhrc_full.component import FullComponent

    assert params.num_tokens is not None
    if context.page_size == 1:
        allocator = TokenToKVPoolAllocator(params.num_tokens, context.dp_size)
    else:
        allocator = PagedTokenToKVPoolAllocator(
            params.num_tokens, context.page_size, context.dp_size
        )
    return FullComponent(allocator, context.policy, context.eviction_priority)


def plan_pool(
    params: FullParams, context: ComponentContext, layers: Sequence[LayerKind]
) -> PoolPlan:
    """The buffers of the KV pool. Raises ConfigError when ``attention`` is not the model's."""
    return _layout(params, context, layers).plan


def make_device_pool(
    params: FullParams, context: ComponentContext, layers: Sequence[LayerKind], mesh: Any = None
) -> KVPool:
    """Allocates the KV pool; over ``mesh`` (axes "data", "tensor") if there is one. Imports jax."""
    from uhrc_full.pool import KVPool

    return KVPool(_layout(params, context, layers), mesh)


def _layout(
    params: FullParams, context: ComponentContext, layers: Sequence[LayerKind]
) -> layout.KVLayout:
    seen = sorted({attention_of(layer) for layer in layers})
    if params.attention is not None and seen != [params.attention]:
        raise ConfigError(f"attention = {params.attention!r}: the model has {', '.join(seen)}")
    return kv_layout([_shape(layer) for layer in layers], params, context)


def _shape(layer: LayerKind) -> layout.LayerShape:
    shape = layer.shape
    if attention_of(layer) == "mla":
        return layout.MLAShape(shape["kv_lora_rank"], shape["qk_rope_head_dim"])
    return layout.GQAShape(shape["num_kv_heads"], shape["head_dim"])
