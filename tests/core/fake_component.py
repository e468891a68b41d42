"""A component to declare in tests: units of 10 bytes a layer, features set by its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from uhrc_core.combination import EXTRA_BUFFER, TRACK_ON_PAGES
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.plan import BufferPlan, LayerKind, PoolPlan
from uhrc_core.registry.specs import ComponentContext, ComponentParams, ComponentSpec
from uhrc_core.registry.tables import PositiveInt
from uhrc_full.component import FullComponent
from uhrc_full.plugin import make_component


class FakeParams(ComponentParams):
    """A table as a recurrent component would have it."""

    size_key = "num_slots"

    num_slots: PositiveInt | None = None
    enable_extra_buffer: bool = False
    track_interval: PositiveInt = 128
    backend: str | None = "kda"

    @property
    def num_units(self) -> int | None:
        return self.num_slots

    @property
    def backend_name(self) -> str | None:
        return self.backend

    def with_num_units(self, num_units: int, page_size: int) -> Self:
        return self.model_copy(update={"num_slots": num_units})

    def num_units_min(self, page_size: int, max_context_len: int) -> int:
        return 2

    def features(self, page_size: int) -> frozenset[str]:
        holds = {
            EXTRA_BUFFER: self.enable_extra_buffer,
            TRACK_ON_PAGES: self.track_interval % page_size == 0,
        }
        return frozenset(name for name, true in holds.items() if true)


def _make(params: FakeParams, context: ComponentContext) -> FullComponent:
    from uhrc_full.params import FullParams

    return make_component(FullParams(num_tokens=params.num_slots), context)


def _plan(params: FakeParams, context: ComponentContext, layers: Sequence[LayerKind]) -> PoolPlan:
    num_units = (params.num_slots or 0) * context.dp_size
    return PoolPlan((BufferPlan("state", (num_units, 10, len(layers)), "uint8"),), num_units)


def _make_pool(params: FakeParams, context: ComponentContext, layers: Sequence[LayerKind]) -> str:
    return f"pool of {params.num_slots}"


def fake_spec(name: str, kind: str = "FULL", **changes: object) -> ComponentSpec:
    """A valid spec, or one with some fields changed."""
    spec = ComponentSpec(
        kind=ComponentType[kind],
        name=name,
        params_model=FakeParams,
        eviction_priority=ComponentType[kind].eviction_priority,
        make_component=_make,
        plan_pool=_plan,
        make_device_pool=_make_pool,
    )
    return replace(spec, **changes)
