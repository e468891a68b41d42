"""Reading a configuration: TOML file, then environment, then overrides, then the plugins' tables.

Everything that is wrong is reported at once, each problem with its TOML key.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from uhrc_core.config import CORE_TABLES, CacheConfig, Config
from uhrc_core.errors import ConfigError, PluginError
from uhrc_core.plugins import installed_plugins, join_faults
from uhrc_core.policies import BUILTIN_POLICIES
from uhrc_core.registry import Registry
from uhrc_core.rules import COMPONENT_RULES, violations
from uhrc_core.specs import ConfigTable

ENV_UNIFIED = "UHRC_ENABLE_UNIFIED_RADIX_TREE"
_ENV_BOOLS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off", ""), False),
}

RawTable = dict[str, Any]
Table = TypeVar("Table", bound=BaseModel)


def load_config(
    path: str | Path, overrides: Iterable[str] = (), environ: Mapping[str, str] = os.environ
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
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_config(tables, overrides, environ=environ, base_dir=Path(path).parent)


def parse_config(
    tables: Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    base_dir: Path = Path(),
) -> Config:
    """Check tables as TOML gives them, changed by the environment and then by ``overrides``.

    Imports the plugins that the tables name, and no other.

    Args:
        overrides: ``"cache.page_size=256"``; the value is TOML, or else taken as a string.
        base_dir: where relative paths start.

    Raises:
        ConfigError: with every problem found.
        PluginError: nothing else is wrong, but a plugin is missing or broken.
    """
    problems: list[str] = []
    raw = deepcopy(dict(tables))
    _merge_env(raw, environ, problems)
    for override in overrides:
        _merge(raw, override, problems)
    components = _subtables(raw, problems)
    registry, faults = _load_named(raw, components, environ, problems)
    reader = TableReader(base_dir)
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
    problems += reader.problems
    if isinstance(cache := core["cache"], CacheConfig) and cache.eviction_policy not in faults:
        problems += policy_options(cache, registry)[1]
    if (problems or faults) and components:
        # The rest of the matrix needs sound tables; `resolve` judges it.
        problems += violations(components, COMPONENT_RULES)
    if problems:
        raise ConfigError([*problems, *map(str, faults.values())])
    if faults:
        raise join_faults(faults.values())
    return Config.model_validate({**core, "components": params, "tables": extra})


class TableReader:
    """Turns raw tables into their models and gathers what is wrong in ``problems``."""

    def __init__(self, base_dir: Path = Path()) -> None:
        self.problems: list[str] = []
        self._base_dir = base_dir

    def read(self, prefix: str, model: type[Table], raw: object) -> Table | None:
        """The table named ``prefix``, or ``None`` after noting its problems.

        Raises:
            PluginError: the model's own code failed.
        """
        try:
            # As JSON, strict validation takes an array for a tuple and a string for a path.
            text = json.dumps(raw, default=str)
            return model.model_validate_json(text, context=self._base_dir)
        except ValidationError as error:
            self.problems += [_problem(prefix, model, item) for item in error.errors()]
            return None
        except Exception as error:
            raise PluginError(
                f"{prefix}: {model.__name__} raised {type(error).__name__}: {error}; report this "
                "to the plugin's author"
            ) from error


def policy_options(
    cache: CacheConfig, registry: Registry
) -> tuple[ConfigTable | None, tuple[str, ...]]:
    """The options of the configured eviction policy, or the problems with it."""
    spec = registry.policies.get(cache.eviction_policy)
    if spec is None:
        hint = suggestion(cache.eviction_policy, registry.policies)
        return None, (f"cache.eviction_policy = {cache.eviction_policy!r}: unknown policy; {hint}",)
    reader = TableReader()
    options = reader.read("cache.eviction_options", spec.options_model, cache.eviction_options)
    return options, tuple(reader.problems)


def suggestion(word: str, choices: Iterable[str]) -> str:
    """The end of a message about a word that is none of ``choices``."""
    known = sorted(choices)
    if close := get_close_matches(word, known, n=1):
        return f"did you mean {close[0]}?"
    return f"it can be {', '.join(known)}" if known else "it has no keys"


def _problem(prefix: str, model: type[BaseModel], item: Any) -> str:
    key = ".".join([prefix, *map(str, item["loc"])])
    if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
        return f"{key}: unknown key; {suggestion(item['loc'][0], model.model_fields)}"
    if item["type"] == "missing":
        return f"{key}: required, but not set"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{key} = {item['input']!r}: {message}"


def _load_named(
    raw: RawTable, components: Iterable[str], environ: Mapping[str, str], problems: list[str]
) -> tuple[Registry, dict[str, PluginError]]:
    """Load the plugins the tables name; what cannot be loaded comes with its key."""
    catalog = installed_plugins(environ)
    keys: dict[str, str] = {}
    if (policy := _plugin_policy(raw)) and policy in catalog.names:
        keys[policy] = "cache.eviction_policy"
    own_tables = {*CORE_TABLES, "components"}
    for name in sorted(raw.keys() - own_tables):
        close = get_close_matches(name, own_tables, n=1)
        if not isinstance(raw[name], dict):
            problems.append(f"{name} = {raw[name]!r}: in no table; put it under one, as [cache]")
        elif close and name not in catalog.names:
            problems.append(f"{name}: unknown table; did you mean [{close[0]}]?")
        else:
            keys[name] = name
    keys |= {name: f"components.{name}" for name in components}
    registry, broken = catalog.load_each(keys)
    for name in keys:
        brought = registry.components if name in components else {**registry.tables, policy: None}
        if name not in broken and name not in brought:
            kind = "component" if name in components else "table"
            problems.append(f"{keys[name]}: the plugin {name!r} brings no {kind} of that name")
    return registry, {name: _at_key(keys[name], error) for name, error in broken.items()}


def _plugin_policy(raw: RawTable) -> str | None:
    """The eviction policy that the tables name, unless it is built in."""
    cache = raw.get("cache")
    policy = cast(RawTable, cache).get("eviction_policy") if isinstance(cache, dict) else None
    builtin = [spec.name for spec in BUILTIN_POLICIES]
    return policy if isinstance(policy, str) and policy not in builtin else None


def _at_key(key: str, error: PluginError) -> PluginError:
    located = PluginError(f"{key}: {error}")
    located.__cause__ = error
    return located


def _subtables(raw: RawTable, problems: list[str]) -> dict[str, object]:
    """The tables under ``[components]``."""
    components = raw.get("components", {})
    if isinstance(components, dict):
        return cast(dict[str, object], components)
    problems.append(f"components = {components!r}: must hold tables, as in [components.full]")
    return {}


def _merge_env(raw: RawTable, environ: Mapping[str, str], problems: list[str]) -> None:
    value = environ.get(ENV_UNIFIED)
    if value is None:
        return
    if value.lower() not in _ENV_BOOLS:
        problems.append(f"environment: {ENV_UNIFIED} = {value!r}: must be 1 or 0")
        return
    _set(raw, ["cache", "enable_unified_radix_tree"], _ENV_BOOLS[value.lower()], problems)


def _merge(raw: RawTable, override: str, problems: list[str]) -> None:
    key, equals, value = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or len(path) < 2 or not all(path):
        problems.append(f"--set {override}: must be TABLE.KEY=VALUE, as in cache.page_size=256")
        return
    _set(raw, path, _toml_value(value.strip()), problems)


def _toml_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _set(raw: RawTable, path: list[str], value: object, problems: list[str]) -> None:
    table: RawTable = raw
    for depth, name in enumerate(path[:-1], start=1):
        below = table.setdefault(name, {})
        if not isinstance(below, dict):
            problems.append(f"{'.'.join(path)}: {'.'.join(path[:depth])} is no table")
            return
        table = cast(RawTable, below)
    table[path[-1]] = value
