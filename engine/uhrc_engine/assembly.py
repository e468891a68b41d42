"""From a model and a configuration to the parts an engine runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from uhrc_core.assemble import build_kv_cache, make_device_pools
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.config.config import Config
from uhrc_core.config.loading import load_config, parse_config
from uhrc_core.config.problems import Problems
from uhrc_core.config.resolve import resolve
from uhrc_core.config.resolved import ResolvedConfig
from uhrc_core.errors import ConfigError
from uhrc_core.indices import page_ceil
from uhrc_core.kinds import ComponentType
from uhrc_engine.config import EngineTable
from uhrc_engine.models.contract import Model
from uhrc_engine.runner import EXACT_ROWS, Bucket, Buckets, DevicePool, Runner
from uhrc_engine.scheduler import FEATURES, SchedulerLimits
from uhrc_engine.weights import Pretrained

CHUNK_SIZE = 256
"""Prompt tokens in a step where ``scheduler.chunked_prefill_size`` is not set; in whole pages."""

CONTEXT_LEN, FULL_CONTEXTS = 4096, 4
"""Of a `default_config`: tokens of a request at most, and how many such requests the pools hold."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What `Engine` needs; the cache's indices and the runner's pools must be of the same size."""

    runner: Runner
    cache: BasePrefixCache
    limits: SchedulerLimits
    resolved: ResolvedConfig

    def without_reuse(self) -> EngineParts:
        """The same runner with a fresh cache that shares nothing: what to compare a run with.

        Both caches give out the same pool's indices: drain one engine before running the other.
        """
        config = self.resolved.config
        cache = config.cache.model_copy(update={"disable_radix_cache": True})
        disabled = replace(self.resolved, config=config.model_copy(update={"cache": cache}))
        return replace(self, cache=build_kv_cache(disabled), resolved=disabled)


def as_config(
    source: Config | str | Path | Mapping[str, Any], overrides: Iterable[str] = ()
) -> Config:
    """A configuration from any of the forms a caller may have it in.

    Raises:
        ConfigError, PluginError: as `uhrc_core.load_config`; or overrides for a finished one.
    """
    overrides = tuple(overrides)
    if isinstance(source, Mapping):
        return parse_config(source, overrides)
    if not isinstance(source, Config):
        return load_config(source, overrides)
    if overrides:
        raise ConfigError(f"overrides {overrides}: a Config is final; override where it is loaded")
    return source


def default_config(pretrained: Pretrained, overrides: Iterable[str] = ()) -> Config:
    """For a model without a configuration: eight requests, pools that hold four of full length.

    A request has up to 4,096 tokens, or what the model was made for if that is less. Pages have 16
    tokens; 128 where there are recurrent layers.

    Raises:
        ConfigError, PluginError: as `uhrc_core.parse_config`.
    """
    kinds = {cache.component for cache in pretrained.model.layer_caches}
    has_states = ComponentType.RECURRENT in kinds
    page_size = 128 if has_states else 16
    max_context_len = min(pretrained.model.max_context_len, CONTEXT_LEN)
    num_tokens = FULL_CONTEXTS * page_ceil(max_context_len, page_size)
    components: dict[str, dict[str, Any]] = {kind.config_name: {} for kind in kinds}
    components[ComponentType.FULL.config_name] = {"num_tokens": num_tokens}
    if has_states:
        components[ComponentType.RECURRENT.config_name] = {"enable_extra_buffer": True}
    cache = {
        "enable_unified_radix_tree": True,
        "page_size": page_size,
        "max_requests": max(EngineTable().decode_rows),
        "max_context_len": max_context_len,
    }
    return parse_config({"cache": cache, "components": components}, overrides)


def build_parts(pretrained: Pretrained, config: Config) -> EngineParts:
    """Allocate the pools, make the cache, and set up the runner; compiles nothing yet.

    Raises:
        ConfigError, PluginError: the configuration is wrong, or does not suit the model.
    """
    _check_suits(config, pretrained)
    config = _with_chunk_size(config)
    resolved = resolve(config, hf_config=pretrained.config, engine_features=FEATURES)
    _check_layers(resolved, pretrained.model)
    pools: dict[ComponentType, DevicePool] = make_device_pools(resolved)
    table, cache = config.table(EngineTable), config.cache
    chunk_size = config.scheduler.chunked_prefill_size
    assert chunk_size is not None
    runner = Runner(
        pretrained.model,
        pretrained.params,
        pools,
        step_buckets(table, chunk_size),
        max_pages=page_ceil(cache.max_context_len, cache.page_size) // cache.page_size,
    )
    limits = SchedulerLimits(
        chunk_size=chunk_size,
        prefill_rows=table.prefill_rows,
        max_running=min(max(table.decode_rows), cache.max_requests),
        headroom_tokens=table.headroom_tokens,
    )
    return EngineParts(runner, build_kv_cache(resolved, pools), limits, resolved)


def _with_chunk_size(config: Config) -> Config:
    """The config with its chunk size settled, which `resolve` takes other defaults from."""
    page_size = config.cache.page_size
    default = page_ceil(CHUNK_SIZE, page_size)
    size = config.scheduler.chunked_prefill_size or default
    scheduler = config.scheduler.model_copy(update={"chunked_prefill_size": size})
    return config.model_copy(update={"scheduler": scheduler})


def _check_suits(config: Config, pretrained: Pretrained) -> None:
    problems, cache = Problems(), config.cache
    if cache.dp_size != 1:
        problems.add("cache.dp_size", "this engine runs one data-parallel rank", cache.dp_size)
    most = pretrained.model.max_context_len
    if cache.max_context_len > most:
        problems.add(
            "cache.max_context_len",
            f"the model was made for {most} positions",
            cache.max_context_len,
        )
    problems.raise_any()


def _check_layers(resolved: ResolvedConfig, model: Model) -> None:
    """The pools are planned from what plugins read in the model's config; the model reads it, too.

    Raises ConfigError when they disagree on how many layers keep what, or on the window that each
    has. Where in the model a pool's layers are does not matter to it.
    """
    planned = Counter(
        _layer_label(part.spec.kind, layer.shape.get("window_tokens"))
        for part in resolved.components
        for layer in part.layers
    )
    wanted = Counter(
        _layer_label(cache.component, cache.window_tokens) for cache in model.layer_caches
    )
    if planned != wanted:
        raise ConfigError(
            f"components: the plugins plan layers {dict(planned)}, the model has {dict(wanted)}; "
            "one of them reads the model's config.json wrongly"
        )


def _layer_label(kind: ComponentType, window_tokens: int | None) -> str:
    return kind.name if window_tokens is None else f"{kind.name} of {window_tokens} tokens"


def step_buckets(table: EngineTable, chunk_size: int) -> Buckets:
    """The step shapes to compile: the widest holds a whole chunk, none is too small to be exact."""
    widths = {*(table.prefill_widths or (EXACT_ROWS,)), chunk_size}
    exact = {max(width, -(-EXACT_ROWS // table.prefill_rows), 2) for width in widths}
    rows = {1, table.prefill_rows}
    shapes = (Bucket(r, w) for r in sorted(rows) for w in sorted(exact))
    prefill = tuple(bucket for bucket in shapes if bucket.rows * bucket.width >= EXACT_ROWS)
    return Buckets(prefill=prefill, decode_rows=table.decode_rows)
