"""Reading a configuration: TOML file, then environment, then overrides, then the plugins' tables.

Everything that is wrong is reported at once, each problem with its TOML key.
"""

from __future__ import annotations

import json
import os
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from uhrc_core.boundary import plugin_code
from uhrc_core.combination import COMPONENT_RULES, broken_rules
from uhrc_core.config.config import Config
from uhrc_core.config.problems import Problems
from uhrc_core.errors import ConfigError, PluginError
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.catalog import PluginCatalog, installed_plugins, join_faults
from uhrc_core.registry.policies import BUILTIN_POLICIES
from uhrc_core.registry.registry import Registry
from uhrc_core.registry.specs import HiCacheParams
from uhrc_core.registry.tables import CORE_TABLES, RESERVED_TABLES, CacheConfig, ConfigTable

ENV_UNIFIED = "UHRC_ENABLE_UNIFIED_RADIX_TREE"
ENV_UNIFIED_RFC = "SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE"
"""The RFC's name of the same; where both are set and differ, `ENV_UNIFIED` counts."""
_ENV_BOOLS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off", ""), False),
}
#: Far beyond any config, and within what can be read, copied and printed.
_NESTING_MAX, _BITS_MAX = 32, 4096

RawTable = dict[str, Any]
Table = TypeVar("Table", bound=BaseModel)


def load_config(
    path: str | Path, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> Config:
    """Read a TOML file; the rest as in `parse_config`, relative paths starting beside the file.

    Raises:
        ConfigError: the file cannot be read or holds problems, all of them listed.
        PluginError: nothing else is wrong, but a plugin it names is missing or broken.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_config(tables, overrides, environ=environ, base_dir=Path(path).parent)


def parse_config(
    tables: Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    base_dir: Path = Path(),
) -> Config:
    """Check tables as TOML gives them, changed by the environment and then by ``overrides``.

    Imports the plugins that the tables name, and no other.

    Args:
        overrides: ``"cache.page_size=256"``; the value is TOML, or else taken as a string. Those
            of components change what the model picks where the tables name no component.
        environ: the process environment unless given.
        base_dir: where relative paths start.

    Raises:
        ConfigError: with every problem found.
        PluginError: nothing else is wrong, but a plugin is missing or broken.
    """
    environ = os.environ if environ is None else environ
    problems = Problems()
    raw = _merged(tables, environ, overrides, problems)
    components = _subtables(raw, problems)
    picked_by_model = bool(components) and not tables.get("components")
    catalog = installed_plugins(environ)
    registry, faults = _load_named(raw, components, catalog, problems)
    reader = TableReader(problems, base_dir)
    core = {
        name: reader.read(name, model, raw.get(name, {})) for name, model in CORE_TABLES.items()
    }
    params = {
        name: reader.read(f"components.{name}", registry.components[name].params_model, table)
        for name, table in components.items()
        if name in registry.components
    }
    extra = {
        name: reader.read(name, spec.table_model, raw[name])
        for name, spec in registry.tables.items()
        if name in raw
    }
    hicache = _read_hicache(raw, registry, reader)
    if isinstance(cache := core["cache"], CacheConfig) and cache.eviction_policy not in faults:
        policy_options(cache, registry, catalog, problems)
    if problems or faults:
        # What can be judged without sound tables; `resolve` judges the rest.
        clashes = _clashes(components, registry, are_all=not picked_by_model)
        if problems or clashes:
            raise ConfigError([*problems.lines, *map(str, faults.values()), *clashes])
        raise join_faults(faults.values())
    return Config.model_validate(
        {
            **core,
            "components": params,
            "picked_by_model": picked_by_model,
            "hicache": hicache,
            "tables": extra,
        }
    )


def _clashes(components: Iterable[str], registry: Registry, *, are_all: bool) -> tuple[str, ...]:
    """The rules on components that these tables break; ``are_all``: others will not join them."""
    kinds = [
        registry.components[name].kind
        if name in registry.components
        else ComponentType.of_table(name)
        for name in components
    ]
    known = [kind for kind in kinds if kind is not None]
    # What is missing may be what a plugin that is not there brings.
    are_all = are_all and len(known) == len(kinds) > 0
    rules = (rule for rule in COMPONENT_RULES if are_all or not rule.requires)
    return broken_rules(known, rules=rules)


class TableReader:
    """Turns raw tables into their models and notes what is wrong in ``problems``."""

    def __init__(self, problems: Problems, base_dir: Path = Path()) -> None:
        self._problems = problems
        self._base_dir = base_dir

    def read(self, prefix: str, model: type[Table], raw: object) -> Table | None:
        """The table named ``prefix``, or ``None`` after noting its problems.

        Raises:
            PluginError: the model's own code failed.
        """
        try:
            with plugin_code(f"{prefix}: {model.__name__} raised", passes=(ValidationError,)):
                # As JSON, strict validation takes an array for a tuple and a string for a path.
                text = json.dumps(raw, default=str)
                return model.model_validate_json(text, context=self._base_dir)
        except ValidationError as error:
            found: dict[str, list[str]] = {}
            for item in error.errors():
                subject, message = _problem(prefix, model, raw, item)
                found.setdefault(subject, []).append(message)
            # Each member of a union has an objection of its own.
            self._problems.add_lines(f"{key}: {', or '.join(said)}" for key, said in found.items())
            return None


def policy_options(
    cache: CacheConfig, registry: Registry, catalog: PluginCatalog, problems: Problems
) -> ConfigTable | None:
    """The options of the configured eviction policy; ``None`` after noting what is wrong."""
    spec = registry.policies.get(cache.eviction_policy)
    if spec is None:
        everything, _ = catalog.load_each(catalog.names)
        hint = suggestion(cache.eviction_policy, everything.policies)
        problems.add("cache.eviction_policy", f"unknown policy; {hint}", cache.eviction_policy)
        return None
    reader = TableReader(problems)
    return reader.read("cache.eviction_options", spec.options_model, cache.eviction_options)


def suggestion(word: str, choices: Iterable[str]) -> str:
    """The end of a message about a word that is none of ``choices``."""
    known = sorted(choices)
    if close := get_close_matches(word, known, n=1):
        return f"did you mean {close[0]}?"
    return f"it can be {', '.join(known)}" if known else "it has no keys"


def _problem(prefix: str, model: type[BaseModel], raw: object, item: Any) -> tuple[str, str]:
    """The key, with its value where there is one, and what is wrong with it."""
    key = ".".join([prefix, *_written(raw, item["loc"])])
    if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
        return key, f"unknown key; {suggestion(item['loc'][0], model.model_fields)}"
    if item["type"] == "missing":
        return f"{key}.{item['loc'][-1]}", "required, but not set"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{key} = {item['input']!r}", message


def _written(raw: object, loc: Iterable[str | int]) -> Iterator[str]:
    """The steps of ``loc`` that a config has; the others are pydantic's, as members of a union."""
    for step in loc:
        if step in (inside := _inside(raw)):
            raw = inside[step]
            yield str(step)


def _absurdities(key: str, value: object, depth: int = 1) -> Iterator[str]:
    """What no table can mean, and what would break whoever copies or prints it."""
    if depth > _NESTING_MAX:
        yield f"{key}: nested more than {_NESTING_MAX} deep"
        return
    if isinstance(value, int) and value.bit_length() > _BITS_MAX:
        yield f"{key}: an integer of {value.bit_length()} bits"
    for name, item in _inside(value).items():
        yield from _absurdities(f"{key}.{name}", item, depth + 1)


def _inside(value: object) -> dict[str | int, object]:
    """What a table or an array holds, by key or index."""
    if isinstance(value, dict):
        return cast("dict[str | int, object]", value)
    return dict(enumerate(cast("list[object]", value))) if isinstance(value, list) else {}


def _load_named(
    raw: RawTable, components: Iterable[str], catalog: PluginCatalog, problems: Problems
) -> tuple[Registry, dict[str, PluginError]]:
    """Load the plugins the tables name; what cannot be loaded comes with its key."""
    wanted: list[tuple[str, str, str]] = []
    if (policy := _plugin_policy(raw)) and policy in catalog.names:
        wanted.append(("cache.eviction_policy", "policy", policy))
    for name in sorted(raw.keys() - {*RESERVED_TABLES}):
        close = get_close_matches(name, RESERVED_TABLES, n=1)
        if not isinstance(raw[name], dict):
            problems.add(name, "in no table; put it under one, as [cache]", raw[name])
        elif close and name not in catalog.names:
            problems.add(name, f"unknown table; did you mean [{close[0]}]?")
        else:
            wanted.append((name, "table", name))
    wanted += [(f"components.{name}", "component", name) for name in components]
    if (tier := _host_tier(raw)) is not None:
        wanted.append(("hicache.name", "host tier", tier))
    keys = {name: key for key, _, name in wanted}
    registry, broken = catalog.load_each(keys)
    for key, kind, name in wanted:
        places = _places(registry, name)
        if name not in broken and kind not in places and kind != "policy":
            others = (f"; for the {other}, write {place}" for other, place in places.items())
            problems.add(
                key, f"the plugin {name!r} brings no {kind} of that name" + "".join(others)
            )
    return registry, {name: at_key(keys[name], error) for name, error in broken.items()}


def _places(registry: Registry, name: str) -> dict[str, str]:
    """What is called ``name``, by kind, and how a config asks for it."""
    brought = {
        "component": (registry.components, f"[components.{name}]"),
        "table": (registry.tables, f"[{name}]"),
        "backend": (registry.backends, f"components.recurrent.backend = {name!r}"),
        "policy": (registry.policies, f"cache.eviction_policy = {name!r}"),
        "host tier": (registry.host_tiers, f"hicache.name = {name!r}"),
    }
    return {kind: place for kind, (known, place) in brought.items() if name in known}


def _plugin_policy(raw: RawTable) -> str | None:
    """The eviction policy that the tables name, unless it is built in."""
    cache = raw.get("cache")
    policy = cast(RawTable, cache).get("eviction_policy") if isinstance(cache, dict) else None
    builtin = [spec.name for spec in BUILTIN_POLICIES]
    return policy if isinstance(policy, str) and policy not in builtin else None


def _host_tier(raw: RawTable) -> str | None:
    """The host tier that the tables name."""
    hicache = raw.get("hicache")
    name = cast(RawTable, hicache).get("name") if isinstance(hicache, dict) else None
    return name if isinstance(name, str) else None


def _read_hicache(raw: RawTable, registry: Registry, reader: TableReader) -> HiCacheParams | None:
    """The ``[hicache]`` table, as the tier it names wants it."""
    name = _host_tier(raw)
    if "hicache" not in raw or (name is not None and name not in registry.host_tiers):
        return None  # none, or a name that has been reported
    model = HiCacheParams if name is None else registry.host_tiers[name].params_model
    return reader.read("hicache", model, raw["hicache"])


def at_key(key: str, error: PluginError) -> PluginError:
    """The error, said to be about ``key``."""
    located = PluginError(f"{key}: {error}")
    located.__cause__ = error
    return located


def _subtables(raw: RawTable, problems: Problems) -> dict[str, object]:
    """The tables under ``[components]``."""
    components = raw.get("components", {})
    if isinstance(components, dict):
        return cast(dict[str, object], components)
    problems.add("components", "must hold tables, as in [components.full]", components)
    return {}


def _merged(
    tables: Mapping[str, Any],
    environ: Mapping[str, str],
    overrides: Iterable[str],
    problems: Problems,
) -> RawTable:
    """The tables as environment and overrides change them. Raises ConfigError for an absurd one."""
    raw = dict(tables)
    _merge_env(raw, environ, problems)
    for override in overrides:
        _merge(raw, override, problems)
    if absurd := [line for name, value in raw.items() for line in _absurdities(name, value)]:
        problems.add_lines(absurd)
        problems.raise_any()
    return raw


def _merge_env(raw: RawTable, environ: Mapping[str, str], problems: Problems) -> None:
    found: dict[str, bool] = {}
    for name in (ENV_UNIFIED_RFC, ENV_UNIFIED):
        value = environ.get(name)
        if value is not None and value.lower() not in _ENV_BOOLS:
            problems.add(f"environment: {name}", "must be 1 or 0", value)
        elif value is not None:
            found[name] = _ENV_BOOLS[value.lower()]
    if len(set(found.values())) > 1:
        warnings.warn(
            f"{ENV_UNIFIED} = {environ[ENV_UNIFIED]!r} counts, not {ENV_UNIFIED_RFC} = "
            f"{environ[ENV_UNIFIED_RFC]!r}; unset one of them",
            stacklevel=4,
        )
    for unified in found.values():  # ours last
        _set(raw, ["cache", "enable_unified_radix_tree"], unified, problems)


def _merge(raw: RawTable, override: str, problems: Problems) -> None:
    key, equals, value = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or len(path) < 2 or not all(path):
        problems.add(f"--set {override}", "must be TABLE.KEY=VALUE, as in cache.page_size=256")
        return
    _set(raw, path, _toml_value(value.strip()), problems)


def _toml_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _set(raw: RawTable, path: list[str], value: object, problems: Problems) -> None:
    table: RawTable = raw
    for depth, name in enumerate(path[:-1], start=1):
        below = table.get(name, {})
        if not isinstance(below, dict):
            problems.add(".".join(path), f"{'.'.join(path[:depth])} is no table")
            return
        # A copy, because the tables are the caller's.
        table[name] = table = dict(cast(RawTable, below))
    table[path[-1]] = value
