"""A configuration by hand: what a program says in keyword arguments instead of in a file.

The keywords become the tables that a file would have, so there is one judge of both. Its messages
name the keywords where they would name the keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from uhrc_core.config.loading import parse_config, suggestion
from uhrc_core.config.resolve import resolve
from uhrc_core.config.resolved import ResolvedConfig
from uhrc_core.errors import ConfigError
from uhrc_core.registry.catalog import ENV_LIMIT
from uhrc_core.registry.tables import CacheConfig


class CacheOptions(TypedDict, total=False):
    """What a cache built by hand can be told; sizes are per dp rank.

    Attributes:
        page_size: tokens per page; 1 by default.
        dp_size: data-parallel ranks; 1 by default.
        max_requests: requests that may run at the same time; 64 by default.
        max_context_len: tokens of one request, prompt and output; by default 8,192, or what the
            FULL pool holds if that is less.
        eviction_policy: ``lru`` (the default), ``lfu``, ``slru``, ``fifo``, ``priority``, or one
            of a plugin.
        eviction_options: options of the policy.
        full_tokens: FULL pool, in tokens, whole pages. The only keyword that is always needed.
        window_tokens: adds SWA: how many tokens a token attends to, itself included.
        swa_tokens: SWA pool, in tokens, whole pages; by default what ``max_requests`` requests own
            and as much again, but no more than FULL has.
        recurrent_backend: adds RECURRENT: the kind of layer, ``kda``, ``gdn``, ``gla``, or one of a
            plugin. With pages, its snapshots are taken in track slots.
        recurrent_slots: state pool; by default what ``max_requests`` requests own and as much
            again.
        track_interval: tokens between snapshots, whole pages; by default
            ``chunked_prefill_size``, else a page.
        chunked_prefill_size: most tokens that one forward adds to a request; window pools can be
            smaller for it.
    """

    page_size: int
    dp_size: int
    max_requests: int
    max_context_len: int
    eviction_policy: str
    eviction_options: Mapping[str, Any]
    full_tokens: int
    swa_tokens: int
    window_tokens: int
    recurrent_slots: int
    track_interval: int
    recurrent_backend: str
    chunked_prefill_size: int


#: Where a config has what a keyword says.
_KEYS = {
    "page_size": "cache.page_size",
    "dp_size": "cache.dp_size",
    "max_requests": "cache.max_requests",
    "max_context_len": "cache.max_context_len",
    "eviction_policy": "cache.eviction_policy",
    "eviction_options": "cache.eviction_options",
    "full_tokens": "components.full.num_tokens",
    "swa_tokens": "components.swa.num_tokens",
    "window_tokens": "components.swa.window_tokens",
    "recurrent_slots": "components.recurrent.num_slots",
    "track_interval": "components.recurrent.track_interval",
    "recurrent_backend": "components.recurrent.backend",
    "chunked_prefill_size": "scheduler.chunked_prefill_size",
}


def resolve_by_hand(options: Mapping[str, Any]) -> ResolvedConfig:
    """The configuration of a unified tree with these `CacheOptions`, settled. Imports no jax.

    The environment changes files and not what a program asks for, so of it only the limit on
    plugins counts here.

    Raises:
        ConfigError: with every problem found, each named by its keyword.
        PluginError: a plugin is missing or broken.
    """
    problems = [
        f"{name}: unknown keyword; {suggestion(name, _KEYS)}"
        for name in options
        if name not in _KEYS
    ]
    if problems:
        raise ConfigError(problems)
    if "full_tokens" not in options:
        raise ConfigError("full_tokens: required, but not set")
    environ = {name: value for name, value in os.environ.items() if name == ENV_LIMIT}
    try:
        config = parse_config(_tables(options), environ=environ)
        return resolve(config, environ=environ)
    except ConfigError as error:
        raise ConfigError(_in_keywords(error.problems)) from None


def _tables(options: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a file that says the same."""
    cache: dict[str, Any] = {"enable_unified_radix_tree": True}
    components: dict[str, dict[str, Any]] = {"full": {}}
    tables: dict[str, Any] = {"cache": cache, "components": components}
    for name, value in options.items():
        *path, key = _KEYS[name].split(".")
        table = tables
        for step in path:
            table = table.setdefault(step, {})
        table[key] = value
    page_size, full_tokens = options.get("page_size", 1), options.get("full_tokens")
    if page_size != 1 and "recurrent" in components:
        components["recurrent"]["enable_extra_buffer"] = True
    if type(full_tokens) is int and type(page_size) is int and full_tokens >= page_size > 0:
        limit = CacheConfig.model_fields["max_context_len"].default
        cache.setdefault("max_context_len", min(limit, full_tokens - full_tokens % page_size))
    return tables


def _in_keywords(problems: Iterable[str]) -> list[str]:
    """The problems with the keywords in the place of the config's keys."""
    said = list(problems)
    for name, key in _KEYS.items():
        said = [problem.replace(key, name) for problem in said]
    return said
