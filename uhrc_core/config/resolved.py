"""A configuration with nothing left open."""

from __future__ import annotations

from dataclasses import dataclass

from uhrc_core.config.config import Config
from uhrc_core.registry.plan import LayerKind, PoolPlan
from uhrc_core.registry.specs import ComponentContext, ComponentParams, ComponentSpec, HiCacheSpec


@dataclass(frozen=True, slots=True)
class ResolvedComponent:
    """A component with everything it needs to be built.

    Attributes:
        params: its table, ``num_units`` set.
        layers: the model's layers it serves, in layer order; empty when no model is known, and of
            FULL, whose indices name a request's tokens, in a model of window layers alone.
        pool: the buffers of its device pool; ``None`` when no model is known.
    """

    spec: ComponentSpec
    params: ComponentParams
    context: ComponentContext
    layers: tuple[LayerKind, ...]
    pool: PoolPlan | None

    @property
    def key(self) -> str:
        """Its table in the config."""
        return f"components.{self.spec.name}"


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration with nothing left open.

    Attributes:
        config: as loaded, with the components that the model picked and the sizes found.
        components: in the order of `ComponentType`.
        host_tier: what ``config.hicache`` names.
    """

    config: Config
    components: tuple[ResolvedComponent, ...]
    host_tier: HiCacheSpec | None = None
