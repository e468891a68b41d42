"""A configuration with nothing left open, and the way a plugin's factories are called with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from uhrc_core.component import ComponentContext, ComponentSpec
from uhrc_core.config import Config
from uhrc_core.errors import PluginError, UHRCError
from uhrc_core.plan import LayerKind, PoolPlan
from uhrc_core.specs import ComponentParams


@dataclass(frozen=True, slots=True)
class ResolvedComponent:
    """A component with everything it needs to be built.

    Attributes:
        params: its table, ``num_units`` set.
        layers: the model's layers it serves, in layer order; empty when no model is known.
        pool: the buffers of its device pool; ``None`` when no model is known.
    """

    spec: ComponentSpec
    params: ComponentParams
    context: ComponentContext
    layers: tuple[LayerKind, ...]
    pool: PoolPlan | None


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration with nothing left open.

    Attributes:
        config: as loaded, with the components that the model picked and the sizes found.
        components: in the order of `ComponentType`.
    """

    config: Config
    components: tuple[ResolvedComponent, ...]


def call_factory(component: str, factory: str, function: Any, *args: Any, **options: Any) -> Any:
    """Call a plugin's factory; what it raises unexpectedly becomes a `PluginError`."""
    try:
        return function(*args, **options)
    except UHRCError:
        raise
    except Exception as error:
        raise PluginError(
            f"components.{component}: {factory} raised {type(error).__name__}: {error}; report "
            "this to the plugin's author"
        ) from error
