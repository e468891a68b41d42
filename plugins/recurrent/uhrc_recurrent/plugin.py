"""What uhrc-recurrent declares: the RECURRENT component and the backends KDA, GDN and GLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from uhrc_core.plugin_api import (
    ComponentContext,
    ComponentSpec,
    ComponentType,
    ConfigError,
    LayerKind,
    PoolPlan,
    RecurrentBackendSpec,
    hookimpl,
)
from uhrc_recurrent import layout
from uhrc_recurrent.backends import BUILTIN_BACKENDS
from uhrc_recurrent.params import RecurrentParams

if TYPE_CHECKING:
    from uhrc_recurrent.component import RecurrentComponent
    from uhrc_recurrent.pool import RecurrentStatePool

UHRC_API = (1, 0)

_IMPLEMENTATIONS = ("reference", "xla")


@hookimpl
def uhrc_component_specs() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind=ComponentType.RECURRENT,
            name="recurrent",
            params_model=RecurrentParams,
            eviction_priority=0,
            make_component=make_component,
            plan_pool=plan_pool,
            make_device_pool=make_device_pool,
            kernels={"copy_slots": _IMPLEMENTATIONS, "track_scatter": _IMPLEMENTATIONS},
        )
    ]


@hookimpl
def uhrc_recurrent_backends() -> list[RecurrentBackendSpec]:
    return list(BUILTIN_BACKENDS)


def make_component(params: RecurrentParams, context: ComponentContext) -> RecurrentComponent:
    """The control plane: tree component and slot pool."""
    from uhrc_core.plugin_api import HybridReqToTokenPool
    from uhrc_recurrent.component import RecurrentComponent
    from uhrc_recurrent.holding import TrackPlan

    assert params.num_slots is not None and params.track_interval is not None
    chunk = 1 if context.backend is None else context.backend.kernel_chunk
    plan = TrackPlan.make(params.num_tracks, params.track_interval, context.page_size, chunk)
    pool = HybridReqToTokenPool(params.num_slots, context.dp_size)
    return RecurrentComponent(pool, context.policy, context.eviction_priority, plan)


def plan_pool(
    params: RecurrentParams, context: ComponentContext, layers: Sequence[LayerKind]
) -> PoolPlan:
    """The buffers of the state pool: temporal and conv, of every recurrent layer."""
    return _layout(params, context, layers).plan


def make_device_pool(
    params: RecurrentParams,
    context: ComponentContext,
    layers: Sequence[LayerKind],
    mesh: Any = None,
) -> RecurrentStatePool:
    """Allocates the state pool; over ``mesh`` (axes "data", "tensor"). Imports jax."""
    from uhrc_recurrent.pool import RecurrentStatePool

    return RecurrentStatePool(_layout(params, context, layers), mesh)


def _layout(
    params: RecurrentParams, context: ComponentContext, layers: Sequence[LayerKind]
) -> layout.StatePoolLayout:
    backend = context.backend
    if backend is None or params.num_slots is None:
        raise ConfigError("backend: not known, so the state has no shape; name one")
    states = [backend.state_layout(backend.params_model(**layer.shape)) for layer in layers]
    return layout.lay_out(
        states,
        num_slots=params.num_slots,
        dp_size=context.dp_size,
        model_dtype=params.dtype,
        platform=params.platform,
    )
