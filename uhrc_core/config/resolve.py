"""Settling a configuration: what one table, the model or the plugins imply for another.

`resolve` is the one place where defaults that depend on something are filled in, and where tables
that are right by themselves are found not to fit together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import InstanceOf

from uhrc_core.boundary import call_factory
from uhrc_core.cache.eviction import EvictionPolicy
from uhrc_core.config.config import Config
from uhrc_core.config.loading import TableReader, at_key, policy_options, suggestion
from uhrc_core.config.model_layers import read_model_layers
from uhrc_core.config.resolved import ResolvedComponent, ResolvedConfig
from uhrc_core.config.sizing import PoolSizing
from uhrc_core.errors import ConfigError
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.catalog import PluginCatalog, installed_plugins, join_faults
from uhrc_core.registry.plan import LayerKind
from uhrc_core.registry.policies import BUILTIN_POLICIES
from uhrc_core.registry.recurrent import RecurrentBackendSpec
from uhrc_core.registry.registry import Registry
from uhrc_core.registry.rules import PAGED, REUSE, UNIFIED, violations
from uhrc_core.registry.specs import (
    ComponentContext,
    ComponentParams,
    ComponentSpec,
    HiCacheSpec,
    RestOfConfig,
)

_REQUEST_TABLE_MAX = 2**32


def resolve(
    config: Config,
    *,
    hf_config: Mapping[str, Any] | None = None,
    engine_features: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> ResolvedConfig:
    """Settle every default and check that all fits together. Imports plugins, no jax.

    Args:
        hf_config: the model's config.json, for a caller that has it; else ``model.hf_config``.
        engine_features: what the engine around the cache does, ``speculative_decoding`` or
            ``mixed_chunked_prefill``; the combination matrix judges them.

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
        self.problems: list[str] = []

    def run(
        self, hf_config: Mapping[str, Any] | None, engine_features: frozenset[str]
    ) -> ResolvedConfig:
        layers, everything = read_model_layers(self.config, hf_config, self.catalog, self.problems)
        if self.problems:  # what follows would be wrong about a model that is not known
            raise ConfigError(self.problems)
        registry = self._registry(layers)
        tables = dict(self.config.components)
        if not tables and layers:
            tables = self._pick(layers, everything)
            registry = everything
        elif not tables and not self.problems:
            self.problems.append("components: none named; add one, or set model.hf_config")
        self._check_cache()
        host_tier = self._host_tier(registry)
        tables = self._settled(tables, layers, registry)
        specs = [registry.components[name] for name in tables]
        self._check_kinds(specs, layers)
        if tables:
            features = self._features(specs, tables) | engine_features
            self.problems += violations(features, registry.rules)
        parts = self._parts(tables, layers, registry)
        if not self.problems:
            sizing = PoolSizing(self.config.cache, self.config.memory.hbm_bytes)
            parts = sizing.size(parts)
            self.problems += sizing.problems
        if self.problems:
            raise ConfigError(self.problems)
        settled = {part.spec.name: part.params for part in parts}
        config = self.config.model_copy(update={"components": settled})
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

    def _pick(self, layers: Sequence[LayerKind], registry: Registry) -> dict[str, ComponentParams]:
        """The components that the model's layers ask for, and FULL, with their default tables."""
        reader = TableReader()
        picked: dict[str, ComponentParams] = {}
        for kind in sorted({ComponentType.FULL, *(layer.component for layer in layers)}):
            specs = [spec for spec in registry.components.values() if spec.kind is kind]
            if len(specs) != 1:
                names = ", ".join(spec.name for spec in specs) or "none"
                self.problems.append(
                    f"components: the model has {kind.name} layers, and the installed components "
                    f"of that kind are: {names}; name one as [components.<name>]"
                )
                continue
            name = specs[0].name
            params = reader.read(f"components.{name}", specs[0].params_model, {})
            if isinstance(params, ComponentParams):
                picked[name] = params
        self.problems += reader.problems
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
                self.problems += [f"components.{name}.{line}" for line in error.problems]
                settled[name] = table
        return settled

    def _parts(
        self,
        tables: Mapping[str, ComponentParams],
        layers: Sequence[LayerKind],
        registry: Registry,
    ) -> tuple[ResolvedComponent, ...]:
        cache = self.config.cache
        options, problems = policy_options(cache, registry, self.catalog)
        self.problems += problems
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
        wanted = _backend_name(name, params)
        if wanted is not None and wanted not in registry.backends:
            everything, _ = self.catalog.load_each(self.catalog.names)
            hint = suggestion(wanted, everything.backends)
            self.problems.append(
                f"components.{name}.backend = {wanted!r}: no recurrent backend; {hint}; for "
                "another, install the distribution that brings it"
            )
        return None if wanted is None else registry.backends.get(wanted)

    def _host_tier(self, registry: Registry) -> HiCacheSpec | None:
        params, cache = self.config.hicache, self.config.cache
        if params is None:
            return None
        if not (cache.enable_unified_radix_tree or cache.disable_radix_cache):
            self.problems.append(
                f"hicache.name = {params.name!r}: needs the unified tree; set "
                "cache.enable_unified_radix_tree = true"
            )
        spec = registry.host_tiers.get(params.name)
        if spec is None:
            everything, _ = self.catalog.load_each(self.catalog.names)
            hint = suggestion(params.name, everything.host_tiers)
            self.problems.append(f"hicache.name = {params.name!r}: no host tier; {hint}")
        elif not isinstance(params, spec.params_model):
            self.problems.append(
                f"hicache: is a {type(params).__name__}, where {params.name!r} needs its "
                f"{spec.params_model.__name__}"
            )
        return spec

    def _check_cache(self) -> None:
        cache = self.config.cache
        plain_tree = not (cache.enable_unified_radix_tree or cache.disable_radix_cache)
        if cache.eviction_policy != "lru" and plain_tree:
            self.problems.append(
                f"cache.eviction_policy = {cache.eviction_policy!r}: without the unified tree it "
                "is lru; set lru, or cache.enable_unified_radix_tree = true"
            )
        entries = cache.max_requests * cache.max_context_len
        if entries > _REQUEST_TABLE_MAX:
            self.problems.append(
                f"cache.max_requests * cache.max_context_len = {entries}: the request table is "
                f"limited to {_REQUEST_TABLE_MAX} entries of 4 bytes; lower one of them"
            )

    def _check_kinds(self, specs: Sequence[ComponentSpec], layers: Sequence[LayerKind]) -> None:
        for kind in ComponentType:
            names = [spec.name for spec in specs if spec.kind is kind]
            if len(names) > 1:
                self.problems.append(
                    f"components: {' and '.join(names)} are both {kind.name}; keep one of them"
                )
            modelled = any(layer.component is kind for layer in layers)
            if layers and names and not modelled and kind is not ComponentType.FULL:
                self.problems.append(
                    f"components.{names[0]}: the model has no {kind.name} layer; remove the table"
                )
            if modelled and not names and self.config.components:
                self.problems.append(
                    f"components: the model has {kind.name} layers; add a table for them, such as "
                    f"[components.{kind.name.lower()}]"
                )

    def _features(
        self, specs: Iterable[ComponentSpec], tables: Mapping[str, ComponentParams]
    ) -> frozenset[str]:
        cache = self.config.cache
        features: set[str] = set()
        if cache.page_size > 1:
            features.add(PAGED)
        if cache.enable_unified_radix_tree:
            features.add(UNIFIED)
        if not cache.disable_radix_cache:
            features.add(REUSE)
        for spec in specs:
            table = tables[spec.name]
            own = call_factory(
                f"components.{spec.name}",
                "features",
                frozenset[str],
                table.features,
                cache.page_size,
            )
            features |= {spec.kind.name.lower(), *own}
        return frozenset(features)


def _num_units(name: str, table: ComponentParams) -> int | None:
    return call_factory(f"components.{name}", "num_units", int | None, lambda: table.num_units)


def _backend_name(name: str, table: ComponentParams) -> str | None:
    key = f"components.{name}"
    return call_factory(key, "backend_name", str | None, lambda: table.backend_name)
