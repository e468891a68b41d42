"""Settling a configuration: what one table, the model or the plugins imply for another.

`resolve` is the one place where defaults that depend on something are filled in, and where tables
that are right by themselves are found not to fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import InstanceOf

from uhrc_core.boundary import call_factory
from uhrc_core.cache.eviction import EvictionPolicy
from uhrc_core.combination import PAGED, REUSE, UNIFIED, table_of
from uhrc_core.config.config import Config
from uhrc_core.config.loading import TableReader, at_key, policy_options, suggestion
from uhrc_core.config.model_layers import read_model_layers
from uhrc_core.config.problems import Problems
from uhrc_core.config.resolved import ResolvedComponent, ResolvedConfig
from uhrc_core.config.sizing import PoolSizing
from uhrc_core.errors import ConfigError
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.catalog import PluginCatalog, installed_plugins, join_faults
from uhrc_core.registry.plan import LayerKind
from uhrc_core.registry.policies import BUILTIN_POLICIES
from uhrc_core.registry.recurrent import RecurrentBackendSpec
from uhrc_core.registry.registry import Registry
from uhrc_core.registry.specs import (
    ComponentContext,
    ComponentParams,
    HiCacheSpec,
    RestOfConfig,
)
from uhrc_core.registry.tables import ConfigTable

_REQUEST_TABLE_MAX = 2**32


def resolve(
    config: Config,
    *,
    hf_config: Mapping[str, Any] | None = None,
    engine_features: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> ResolvedConfig:
    """Settle every default and check that all fits together. Imports plugins, no jax.

    Args:
        hf_config: the model's config.json, for a caller that has it; else ``model.hf_config``.
        engine_features: what the engine around the cache does, ``speculative_decoding`` or
            ``mixed_chunked_prefill``; the combination matrix judges them.
        environ: the process environment unless given.

    Raises:
        ConfigError: with every problem found.
        PluginError: a plugin is missing, broken, or its factory raised.
    """
    return _Resolver(config, installed_plugins(environ)).run(hf_config, frozenset(engine_features))


class _Resolver:
    """One run of `resolve`; gathers ``problems`` as it goes."""

    def __init__(self, config: Config, catalog: PluginCatalog) -> None:
        self.config = config
        self.catalog = catalog
        self.problems = Problems()

    def run(
        self, hf_config: Mapping[str, Any] | None, engine_features: frozenset[str]
    ) -> ResolvedConfig:
        layers, everything = read_model_layers(self.config, hf_config, self.catalog, self.problems)
        self.problems.raise_any()  # what follows would be wrong about a model that is not known
        registry = self._registry(layers)
        tables = dict(self.config.components)
        if layers and (self.config.picked_by_model or not tables):
            tables = self._pick(layers, everything) | tables
            registry = everything
        elif not tables or (self.config.picked_by_model and not self._has_full(registry)):
            self.problems.add("components", "none named; add one, or set model.hf_config")
            tables = {}
        options = policy_options(self.config.cache, registry, self.catalog, self.problems)
        self._check_cache()
        host_tier = self._host_tier(registry)
        needless, missing = self._check_kinds(tables, layers, registry)
        tables = {name: table for name, table in tables.items() if name not in needless}
        tables = self._settled(tables, layers, registry)
        if tables:
            self._check_combination(tables, missing, registry, engine_features)
        parts = self._parts(tables, layers, registry, options)
        if not self.problems:
            memory = self.config.memory.hbm_bytes
            parts = PoolSizing(self.config.cache, memory, self.problems).size(parts)
        self.problems.raise_any()
        settled = {part.spec.name: part.params for part in parts}
        config = self.config.model_copy(update={"components": settled, "picked_by_model": False})
        return ResolvedConfig(config, parts, host_tier)

    def _registry(self, layers: Sequence[LayerKind]) -> Registry:
        """The plugins that the config names, and the backends of the model's layers; `_parts`
        reports names that no plugin has."""
        policy = self.config.cache.eviction_policy
        builtin = [spec.name for spec in BUILTIN_POLICIES]
        keys = {layer.backend: "model" for layer in layers}
        keys |= {} if policy in builtin else {policy: "cache.eviction_policy"}
        for name, table in self.config.components.items():
            if backend := _backend_name(name, table):
                keys[backend] = f"components.{name}.backend"
        keys = {name: key for name, key in keys.items() if name in self.catalog.names}
        keys |= {name: f"components.{name}" for name in self.config.components}
        if self.config.hicache is not None:
            keys |= {self.config.hicache.name: "hicache.name"}
        registry, broken = self.catalog.load_each(keys)
        if broken:
            raise join_faults(at_key(keys[name], error) for name, error in broken.items())
        if foreign := self.config.components.keys() - registry.components.keys():
            raise ConfigError([f"components.{name}: no such component" for name in sorted(foreign)])
        return registry

    def _has_full(self, registry: Registry) -> bool:
        kinds = (registry.components[name].kind for name in self.config.components)
        return ComponentType.FULL in kinds

    def _pick(self, layers: Sequence[LayerKind], registry: Registry) -> dict[str, ComponentParams]:
        """The components that the model's layers ask for, and FULL, with their default tables."""
        reader = TableReader(self.problems)
        picked: dict[str, ComponentParams] = {}
        for kind in sorted({ComponentType.FULL, *(layer.component for layer in layers)}):
            specs = [spec for spec in registry.components.values() if spec.kind is kind]
            specs = [spec for spec in specs if spec.name in self.config.components] or specs
            if len(specs) != 1:
                names = ", ".join(spec.name for spec in specs) or "none"
                self.problems.add(
                    "components",
                    f"the model has {kind.name} layers, and the installed components of that kind "
                    f"are: {names}; name one as [components.<name>]",
                )
                continue
            name = specs[0].name
            params = reader.read(f"components.{name}", specs[0].params_model, {})
            if isinstance(params, ComponentParams):
                picked[name] = params
        return picked

    def _settled(
        self,
        tables: Mapping[str, ComponentParams],
        layers: Sequence[LayerKind],
        registry: Registry,
    ) -> dict[str, ComponentParams]:
        """The tables with what the rest of the config and the model imply for them."""
        settled: dict[str, ComponentParams] = {}
        full = [name for name in tables if registry.components[name].kind is ComponentType.FULL]
        full_tokens = next((_num_units(name, tables[name]) for name in full), None)
        for name, table in tables.items():
            own = [layer for layer in layers if layer.component is registry.components[name].kind]
            try:
                settled[name] = call_factory(
                    f"components.{name}",
                    "settled",
                    InstanceOf[ComponentParams],
                    table.settled,
                    RestOfConfig(self.config.cache, self.config.scheduler, full_tokens, own),
                )
            except ConfigError as error:
                self.problems.add_lines(f"components.{name}.{line}" for line in error.problems)
                settled[name] = table
        return settled

    def _parts(
        self,
        tables: Mapping[str, ComponentParams],
        layers: Sequence[LayerKind],
        registry: Registry,
        options: ConfigTable | None,
    ) -> tuple[ResolvedComponent, ...]:
        """The components that can be made; without ``options`` of the eviction policy, none."""
        cache = self.config.cache
        if options is None:
            return ()
        policy = registry.policies[cache.eviction_policy]
        parts: list[ResolvedComponent] = []
        for name, params in tables.items():
            spec = registry.components[name]
            victim_order = call_factory(
                f"cache.eviction_policy = {policy.name!r}",
                "make_policy",
                EvictionPolicy,
                policy.make_policy,
                options,
            )
            backend = self._backend(name, params, registry)
            context = ComponentContext(
                cache.page_size, cache.dp_size, victim_order, spec.eviction_priority, backend
            )
            own = tuple(layer for layer in layers if layer.component is spec.kind)
            parts.append(ResolvedComponent(spec, params, context, own, None))
        return tuple(sorted(parts, key=lambda part: part.spec.kind))

    def _backend(
        self, name: str, params: ComponentParams, registry: Registry
    ) -> RecurrentBackendSpec | None:
        wanted, key = _backend_name(name, params), f"components.{name}.backend"
        if wanted is not None and wanted not in registry.backends and not self.problems.blames(key):
            everything, _ = self.catalog.load_each(self.catalog.names)
            hint = suggestion(wanted, everything.backends)
            self.problems.add(
                key,
                f"no recurrent backend; {hint}; for another, install the distribution that brings "
                "it",
                wanted,
            )
        return None if wanted is None else registry.backends.get(wanted)

    def _host_tier(self, registry: Registry) -> HiCacheSpec | None:
        params, cache = self.config.hicache, self.config.cache
        if params is None:
            return None
        if not (cache.enable_unified_radix_tree or cache.disable_radix_cache):
            self.problems.add(
                "hicache.name",
                "needs the unified tree; set cache.enable_unified_radix_tree = true",
                params.name,
            )
        spec = registry.host_tiers.get(params.name)
        if spec is None:
            everything, _ = self.catalog.load_each(self.catalog.names)
            hint = suggestion(params.name, everything.host_tiers)
            self.problems.add("hicache.name", f"no host tier; {hint}", params.name)
        elif not isinstance(params, spec.params_model):
            self.problems.add(
                "hicache",
                f"is a {type(params).__name__}, where {params.name!r} needs its "
                f"{spec.params_model.__name__}",
            )
        return spec

    def _check_cache(self) -> None:
        cache, policy = self.config.cache, "cache.eviction_policy"
        plain_tree = not (cache.enable_unified_radix_tree or cache.disable_radix_cache)
        if cache.eviction_policy != "lru" and plain_tree and not self.problems.blames(policy):
            self.problems.add(
                policy,
                "without the unified tree it is lru; set lru, or cache.enable_unified_radix_tree = "
                "true",
                cache.eviction_policy,
            )
        entries = cache.max_requests * cache.max_context_len
        if entries > _REQUEST_TABLE_MAX:
            self.problems.add(
                "cache.max_requests * cache.max_context_len",
                f"the request table is limited to {_REQUEST_TABLE_MAX} entries of 4 bytes; lower "
                "one of them",
                entries,
            )

    def _check_kinds(
        self, names: Iterable[str], layers: Sequence[LayerKind], registry: Registry
    ) -> tuple[set[str], set[ComponentType]]:
        """The tables that the model has no layer for, and the kinds that it lacks a table for."""
        by_kind: dict[ComponentType, list[str]] = {kind: [] for kind in ComponentType}
        for name in names:
            by_kind[registry.components[name].kind].append(name)
        modelled = {layer.component for layer in layers}
        needless: set[str] = set()
        missing: set[ComponentType] = set()
        for kind, own in by_kind.items():
            if len(own) > 1:
                both = " and ".join(own)
                self.problems.add("components", f"{both} are both {kind.name}; keep one of them")
            if own and layers and kind not in modelled and kind is not ComponentType.FULL:
                advice = "set nothing of it" if self.config.picked_by_model else "remove the table"
                message = f"the model has no {kind.name} layer; {advice}"
                self.problems.add(f"components.{own[0]}", message)
                needless.update(own)
            if kind in modelled and not own:
                missing.add(kind)
                # What the model could not pick is blamed already.
                if not self.problems.blames("components"):
                    self.problems.add(
                        "components",
                        f"the model has {kind.name} layers; add a table for them, such as "
                        f"{table_of(kind)}",
                    )
        return needless, missing

    def _check_combination(
        self,
        tables: Mapping[str, ComponentParams],
        missing: set[ComponentType],
        registry: Registry,
        engine_features: frozenset[str],
    ) -> None:
        """All settings against the rules.

        They judge what will be once the other problems are mended: with the tables that are
        missing, and without what a table says which is wrong itself.
        """
        kinds = {name: registry.components[name].kind for name in tables}
        unsound = {name for name in tables if self.problems.blames(f"components.{name}")}
        features, backend = self._features([n for n in tables if n not in unsound], tables)
        self.problems.add_lines(
            registry.broken_rules(
                {*kinds.values(), *missing},
                features | engine_features,
                backend,
                unknown={*missing, *(kinds[name] for name in unsound)},
            )
        )

    def _features(
        self, names: Sequence[str], tables: Mapping[str, ComponentParams]
    ) -> tuple[frozenset[str], str | None]:
        """What ``[cache]`` and these tables turn on, and the recurrent backend that they name."""
        cache = self.config.cache
        settings = {
            PAGED: cache.page_size > 1,
            UNIFIED: cache.enable_unified_radix_tree,
            REUSE: not cache.disable_radix_cache,
        }
        features = {feature for feature, is_on in settings.items() if is_on}
        backends: list[str | None] = []
        for name in names:
            key, table = f"components.{name}", tables[name]
            features |= call_factory(
                key, "features", frozenset[str], table.features, cache.page_size
            )
            backends.append(_backend_name(name, table))
        return frozenset(features), next(filter(None, backends), None)


def _num_units(name: str, table: ComponentParams) -> int | None:
    return call_factory(f"components.{name}", "num_units", int | None, lambda: table.num_units)


def _backend_name(name: str, table: ComponentParams) -> str | None:
    key = f"components.{name}"
    return call_factory(key, "backend_name", str | None, lambda: table.backend_name)
