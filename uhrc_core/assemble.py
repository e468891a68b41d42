"""From a configuration to a cache and its device pools: what comes out are plain objects.

cache = build_kv_cache(page_size=16, full_tokens=4096)        # by hand

resolved = resolve(load_config("cache.toml"))
pools = make_device_pools(resolved)           # device plane, imports jax
cache = build_kv_cache(resolved, pools)       # control plane; only a host tier needs the pools
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from uhrc_core.baseline import ChunkCache, RadixCache, SWARadixCache
from uhrc_core.boundary import call_factory
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.host_tier import HiCacheComponent, HiCacheContext, HiCacheHooks
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.config.by_hand import CacheOptions, resolve_by_hand
from uhrc_core.config.config import Config
from uhrc_core.config.resolve import resolve
from uhrc_core.config.resolved import ResolvedComponent, ResolvedConfig
from uhrc_core.errors import ConfigError, PluginError
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedIndexAllocator
from uhrc_core.registry.specs import HiCacheSpec


def build_kv_cache(
    config: Config | ResolvedConfig | None = None,
    device_pools: Mapping[ComponentType, Any] | None = None,
    **by_hand: Unpack[CacheOptions],
) -> BasePrefixCache:
    """The prefix cache of a configuration, or one by hand: ``page_size=16, full_tokens=4096``.

    By hand it is the unified tree; a configuration may have that off, which gives a plain cache.

    Args:
        config: of `load_config`, `parse_config` or `resolve`.
        device_pools: of `make_device_pools`, for a host tier that moves data.
        by_hand: see `CacheOptions`; in the place of ``config``.

    Raises:
        ConfigError: with every problem found.
        PluginError: a plugin is missing, broken, or its factory raised.
    """
    resolved = _resolved(config, by_hand)
    cache = resolved.config.cache
    built = cache_class(resolved)(
        components=make_components(resolved),
        page_size=cache.page_size,
        dp_size=cache.dp_size,
        max_requests=cache.max_requests,
        max_context_len=cache.max_context_len,
    )
    if isinstance(built, UnifiedRadixCache) and resolved.host_tier is not None:
        _attach_host_tier(built, resolved.host_tier, resolved, device_pools or {})
    return built


def cache_class(resolved: ResolvedConfig) -> type[UnifiedRadixCache | RadixCache]:
    """Which cache ``[cache]`` asks for, for these components."""
    cache = resolved.config.cache
    if cache.disable_radix_cache:
        return ChunkCache
    if cache.enable_unified_radix_tree:
        return UnifiedRadixCache
    kinds = {part.spec.kind for part in resolved.components}
    return SWARadixCache if ComponentType.SWA in kinds else RadixCache


def make_components(resolved: ResolvedConfig) -> list[TreeComponent]:
    """Fresh components with their allocators, for a cache of the caller's own making.

    Raises:
        PluginError: a plugin's factory raised or made something else.
    """
    full = None
    made: list[TreeComponent] = []
    for part in resolved.components:  # FULL first
        component = _make_component(part, full)
        made.append(component)
        if component.kind is ComponentType.FULL:
            full = component.allocator
    return made


def make_device_pools(resolved: ResolvedConfig, **options: Any) -> dict[ComponentType, Any]:
    """Allocate the pool of every component, by its kind. Imports jax.

    Args:
        options: passed on to each ``make_device_pool``, e.g. ``mesh``.

    Raises:
        ConfigError: the model is not known, so the pools have no shape.
        PluginError: a plugin's factory raised.
    """
    if any(part.pool is None for part in resolved.components):
        raise ConfigError(
            "model.hf_config: not set, so the pools have no shape; set it, or pass hf_config to "
            "resolve"
        )
    return {
        part.spec.kind: call_factory(
            part.key,
            "make_device_pool",
            Any,
            part.spec.make_device_pool,
            part.params,
            part.context,
            part.layers,
            **options,
        )
        for part in resolved.components
    }


def _resolved(config: Config | ResolvedConfig | None, by_hand: CacheOptions) -> ResolvedConfig:
    """The configuration that a caller named in one of the two ways."""
    if config is None and by_hand:
        return resolve_by_hand(by_hand)
    if config is None:
        raise ConfigError(
            "build_kv_cache: told nothing; pass load_config(path), or sizes such as page_size=16, "
            "full_tokens=4096"
        )
    if not isinstance(config, Config | ResolvedConfig):
        raise ConfigError(f"config: {config!r} is no Config; make one with load_config(path)")
    if by_hand:
        raise ConfigError(
            f"build_kv_cache: both a config and {', '.join(by_hand)}; say it in the config, as in "
            'load_config(path, ["cache.page_size=16"])'
        )
    return config if isinstance(config, ResolvedConfig) else resolve(config)


def _attach_host_tier(
    cache: UnifiedRadixCache,
    spec: HiCacheSpec,
    resolved: ResolvedConfig,
    device_pools: Mapping[ComponentType, Any],
) -> None:
    components = {
        part.spec.kind: HiCacheComponent(
            component.allocator.capacity,
            part.pool.bytes_per_unit if part.pool else None,
            device_pools.get(part.spec.kind),
        )
        for part, component in zip(resolved.components, cache.components, strict=True)
    }
    context = HiCacheContext(cache.page_size, cache.dp_size, components)
    hooks = call_factory(
        f"hicache.name = {spec.name!r}",
        "make_hooks",
        HiCacheHooks,
        spec.make_hooks,
        resolved.config.hicache,
        context,
    )
    cache.attach_hicache(hooks, {kind: part.bytes_per_unit for kind, part in components.items()})


def _make_component(part: ResolvedComponent, full: PagedIndexAllocator | None) -> TreeComponent:
    spec, context = part.spec, replace(part.context, full_allocator=full)
    component: TreeComponent = call_factory(
        part.key, "make_component", TreeComponent, spec.make_component, part.params, context
    )
    if component.kind is not spec.kind:
        raise PluginError(
            f"{part.key}: make_component returned a {component.kind.name} component, where its "
            f"spec says {spec.kind.name}; report this to the plugin's author"
        )
    return component
