"""The records that plugins hand to the core. All of them only declare.

A record names something a config can ask for and carries the factory that makes it; the core calls
the factory when a config asks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import Field

from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.eviction import EvictionPolicy
from uhrc_core.cache.host_tier import HiCacheContext, HiCacheHooks
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedIndexAllocator
from uhrc_core.registry.plan import LayerKind, PoolPlan
from uhrc_core.registry.recurrent import RecurrentBackendSpec
from uhrc_core.registry.tables import CacheConfig, ConfigTable, SchedulerConfig


@dataclass(frozen=True, slots=True)
class RestOfConfig:
    """What the other tables and the model say, for a component's table to be settled by.

    Attributes:
        full_tokens: what the FULL component's table sets as its pool's size; ``None``: nothing.
        layers: the model's layers of this component; empty where no model is known.
    """

    cache: CacheConfig
    scheduler: SchedulerConfig
    full_tokens: int | None
    layers: Sequence[LayerKind]


class ComponentParams(ConfigTable):
    """Base of the ``[components.<name>]`` tables; all sizes are per dp rank.

    Attributes:
        size_key: the key that sets the pool's size, such as ``num_tokens``.
        size_advice: what to do where the pool is smaller than `num_units_min`.
    """

    size_key: ClassVar[str]
    size_advice: ClassVar[str] = "raise it, or lower cache.max_context_len"

    @property
    @abstractmethod
    def num_units(self) -> int | None:
        """Tokens (FULL, SWA) or slots (RECURRENT) of the pool; ``None``: size it from memory."""

    @abstractmethod
    def with_num_units(self, num_units: int, page_size: int) -> Self:
        """A copy with the largest valid pool of at most ``num_units``: whole pages of tokens."""

    @abstractmethod
    def num_units_min(self, page_size: int, max_context_len: int) -> int:
        """The smallest pool that can run one request of ``max_context_len`` tokens."""

    @property
    def backend_name(self) -> str | None:
        """The recurrent backend that this table asks for, by name, if it is of that kind."""
        return None

    def settled(self, rest: RestOfConfig) -> Self:
        """A copy with what other tables and the model's layers of this component imply.

        Raises ConfigError for what contradicts them; each line starts with the key's own name.
        """
        return self

    def features(self, page_size: int) -> frozenset[str]:
        """What this table turns on, for the combination matrix (see `uhrc_core.combination`)."""
        return frozenset()


class HiCacheParams(ConfigTable):
    """Base of the ``[hicache]`` table; a host tier adds its options."""

    name: str = Field(description="The host tier that is asked and told; a plugin brings it.")


@dataclass(frozen=True, slots=True)
class ComponentContext:
    """What a component is built for, resolved from ``[cache]``.

    Attributes:
        page_size: tokens per page.
        dp_size: data-parallel ranks; each has its own pools of the sizes in ``params``.
        policy: the eviction policy, made once per component.
        eviction_priority: of the component's `ComponentSpec`.
        backend: for a RECURRENT component, the backend of the model's recurrent layers.
        full_allocator: the index space of the FULL component, which is made first; ``None`` for
            FULL itself, and where no component is made (pools are planned before).
    """

    page_size: int
    dp_size: int
    policy: EvictionPolicy
    eviction_priority: int
    backend: RecurrentBackendSpec | None = None
    full_allocator: PagedIndexAllocator | None = None


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """A component as a plugin declares it; factories are called only when the config asks.

    Attributes:
        kind: which slot of a node it fills.
        name: its table in the config, ``[components.<name>]``.
        params_model: model of that table.
        eviction_priority: on internal nodes: FULL 2 > SWA 1 > RECURRENT 0; a component gets it from
            its context.
        make_component: control plane, no jax.
        plan_pool: buffers of the device pool that these layers need; no jax.
        make_device_pool: the pool of ``plan_pool``'s arguments: device plane, imports jax.
        kernels: name of each kernel and its implementations.
    """

    kind: ComponentType
    name: str
    params_model: type[ComponentParams]
    eviction_priority: int
    make_component: Callable[[Any, ComponentContext], TreeComponent]
    plan_pool: Callable[[Any, ComponentContext, Sequence[LayerKind]], PoolPlan]
    make_device_pool: Callable[..., Any]
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


@dataclass(frozen=True, slots=True)
class EvictionPolicySpec:
    """A victim order that ``cache.eviction_policy`` can name.

    Attributes:
        name: what the config says.
        options_model: pydantic model of ``[cache.eviction_options]`` for this policy.
        make_policy: called once a component with an instance of ``options_model``.
    """

    name: str
    options_model: type[ConfigTable]
    make_policy: Callable[[Any], EvictionPolicy]


@dataclass(frozen=True, slots=True)
class HiCacheSpec:
    """A host tier that ``hicache.name`` can name.

    Attributes:
        name: what the config says.
        params_model: model of the ``[hicache]`` table for this tier.
        make_hooks: called once a cache, with an instance of ``params_model``.
    """

    name: str
    params_model: type[HiCacheParams]
    make_hooks: Callable[[Any, HiCacheContext], HiCacheHooks]


@dataclass(frozen=True, slots=True)
class ConfigTableSpec:
    """A top-level config table of the plugin's own, read back with ``config.table(table_model)``.

    Attributes:
        name: the table, ``[<name>]``; also the name of the plugin's entry point.
        table_model: its pydantic model. With a default for every key, the table can be left out.
    """

    name: str
    table_model: type[ConfigTable]


@dataclass(frozen=True, slots=True)
class CliCommandSpec:
    """A command of ``uhrc``.

    Attributes:
        name: what the user types after ``uhrc``.
        function: a typer command function; its docstring is the help text. Import what is heavy
            inside it. Wrap it with `uhrc_core.cli.options.with_config` when it reads a config file.
    """

    name: str
    function: Callable[..., None]


class NoOptions(ConfigTable):
    """A policy without options."""
