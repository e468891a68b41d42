"""Registry: what the loaded plugins declare, checked and typed.

Every record is checked when its plugin is registered, so that a plugin's mistake is reported with
the plugin's name and not where the record is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any, TypeVar, cast

import pluggy

from uhrc_core.boundary import mistake_in, plugin_code
from uhrc_core.combination import CORE_RULES, Rule, broken_rules
from uhrc_core.errors import ConfigError, PluginError, UHRCError
from uhrc_core.kinds import ComponentType, eviction_order_mistake
from uhrc_core.registry import hookspecs
from uhrc_core.registry.plan import LayerKind
from uhrc_core.registry.policies import BUILTIN_POLICIES
from uhrc_core.registry.recurrent import RecurrentBackendSpec, hybrid_layers
from uhrc_core.registry.specs import (
    CliCommandSpec,
    ComponentSpec,
    ConfigTableSpec,
    EvictionPolicySpec,
    HiCacheSpec,
)
from uhrc_core.registry.tables import RESERVED_TABLES, ConfigTable

Record = TypeVar("Record")
Named = (
    ComponentSpec
    | RecurrentBackendSpec
    | EvictionPolicySpec
    | HiCacheSpec
    | ConfigTableSpec
    | CliCommandSpec
)


class Registry:
    """Declared records by name; filled by `register`, read-only afterwards.

    Attributes:
        components, backends, policies, host_tiers, tables, commands: by name; built-in policies
            included.
        owners: which plugin brought a command.
        rules: the core's combination matrix and what plugins add to it.
    """

    def __init__(self) -> None:
        self.components: dict[str, ComponentSpec] = {}
        self.backends: dict[str, RecurrentBackendSpec] = {}
        self.policies = {spec.name: spec for spec in BUILTIN_POLICIES}
        self.host_tiers: dict[str, HiCacheSpec] = {}
        self.tables: dict[str, ConfigTableSpec] = {}
        self.commands: dict[str, CliCommandSpec] = {}
        self.owners: dict[str, str] = {}
        self.rules: tuple[Rule, ...] = CORE_RULES
        self._manager = pluggy.PluginManager("uhrc")
        self._manager.add_hookspecs(hookspecs)

    def register(self, label: str, module: ModuleType, claimed: frozenset[str]) -> None:
        """Take over what a plugin module declares; all of it or, when it raises, nothing.

        Args:
            label: how messages call the plugin.
            claimed: the names it is registered under in its distribution's entry points; what a
                config can name must be among them, or the config could not find its plugin.

        Raises:
            PluginError: a misspelt or unmarked hook, a hook that raises or returns something else,
                a record that is not valid, a name taken by another plugin.
        """
        if self._manager.is_registered(module):
            return
        self._check_hook_names(label, module)
        try:
            self._manager.register(module, name=label)
            self._take_over(label, module, claimed)
        except BaseException as error:
            if self._manager.is_registered(module):
                self._manager.unregister(module)
            if isinstance(error, pluggy.PluginValidationError):
                raise PluginError(f"{label}: {error}; correct the hook's parameters") from error
            raise

    def _take_over(self, label: str, module: ModuleType, claimed: frozenset[str]) -> None:
        components = self._records(label, "uhrc_component_specs", ComponentSpec)
        backends = self._records(label, "uhrc_recurrent_backends", RecurrentBackendSpec)
        policies = self._records(label, "uhrc_eviction_policies", EvictionPolicySpec)
        tiers = self._records(label, "uhrc_hicache_hooks", HiCacheSpec)
        tables = self._records(label, "uhrc_config_tables", ConfigTableSpec)
        commands = self._records(label, "uhrc_cli_commands", CliCommandSpec)
        rules = self._records(label, "uhrc_combination_rules", Rule)
        for spec in components:
            _check_component(label, spec)
        _check_models(label, [spec.params_model for spec in (*components, *backends, *tiers)])
        _check_models(label, [spec.options_model for spec in policies])
        _check_models(label, [spec.table_model for spec in tables])
        for record in (*components, *backends, *policies, *tiers, *tables):
            if record.name not in claimed:
                raise PluginError(
                    f"{label} declares {record.name!r} but is not registered under that name; add "
                    f"the entry point {record.name} = {module.__name__!r} to its pyproject.toml"
                )
        _check_new(label, self.components, components)
        _check_new(label, self.backends, backends)
        _check_new(label, self.policies, policies)
        _check_new(label, self.host_tiers, tiers)
        _check_new(label, {**self.tables, **dict.fromkeys(RESERVED_TABLES)}, tables)
        _check_new(label, self.commands, commands)
        self.components |= {spec.name: spec for spec in components}
        self.backends |= {spec.name: spec for spec in backends}
        self.policies |= {spec.name: spec for spec in policies}
        self.host_tiers |= {spec.name: spec for spec in tiers}
        self.tables |= {spec.name: spec for spec in tables}
        self.commands |= {spec.name: spec for spec in commands}
        self.owners |= {spec.name: label for spec in commands}
        self.rules += tuple(rules)

    def broken_rules(
        self,
        components: Iterable[ComponentType],
        features: Iterable[str],
        backend: str | None,
        unknown: Iterable[ComponentType] = (),
    ) -> tuple[str, ...]:
        """Every rule, of the core and of plugins, that keeps these from being a `Combination`.

        Rules about keys of ``unknown`` components, whose tables are not settled, are left out.
        """
        keys = tuple(f"components.{kind.config_name}." for kind in unknown)
        rules = (
            rule
            for rule in self.rules
            if not any(feature.startswith(keys) for feature in rule.features)
        )
        return broken_rules(components, features, backend, rules)

    @property
    def brought(self) -> list[str]:
        """What plugins brought, as ``component full``: kind and name, in a fixed order."""
        named = {
            "component": self.components,
            "backend": self.backends,
            "policy": self.policies.keys() - {spec.name for spec in BUILTIN_POLICIES},
            "host tier": self.host_tiers,
            "table": self.tables,
            "command": self.commands,
        }
        brought = [f"{kind} {name}" for kind, names in named.items() for name in sorted(names)]
        extra_rules = len(self.rules) - len(CORE_RULES)
        knows_models = bool(self._manager.hook.uhrc_layer_kinds.get_hookimpls())
        return brought + ["layer kinds"] * knows_models + ["rules"] * bool(extra_rules)

    def layer_kinds(self, hf_config: Mapping[str, Any]) -> tuple[LayerKind, ...] | None:
        """The layers of a model, or ``None`` when no loaded plugin knows it.

        A plugin that fails at a model which another one knows is passed over.

        Raises:
            ConfigError: two recurrent backends claim it, or its config holds an impossible value.
            PluginError: two plugins answer, or none does and one raises.
        """
        faults: list[UHRCError] = []
        try:
            if hybrid := hybrid_layers(hf_config, tuple(self.backends.values())):
                return hybrid
        except PluginError as error:
            faults.append(error)
        answers: dict[str, tuple[LayerKind, ...]] = {}
        for impl in self._implementations("uhrc_layer_kinds"):
            try:
                answer = _answer(impl, "uhrc_layer_kinds", LayerKind, hf_config)
            except UHRCError as error:
                faults.append(error)
            else:
                answers |= {} if answer is None else {impl.plugin_name: tuple(answer)}
        if len(answers) > 1:
            raise PluginError(
                f"the model is claimed by {' and '.join(answers)}; limit the plugins with "
                "UHRC_PLUGINS, or uninstall one"
            )
        if not answers and faults:
            raise min(faults, key=lambda fault: isinstance(fault, PluginError))
        return next(iter(answers.values()), None)

    def _records(self, label: str, hook: str, kind: type[Record]) -> Sequence[Record]:
        return [
            record
            for impl in self._implementations(hook)
            if impl.plugin_name == label
            for record in _answer(impl, hook, kind) or ()
        ]

    def _implementations(self, hook: str) -> Sequence[pluggy.HookImpl]:
        """In order of registration (pluggy's own order is the reverse)."""
        return vars(self._manager.hook)[hook].get_hookimpls()

    def _check_hook_names(self, label: str, module: ModuleType) -> None:
        known = [name for name in vars(hookspecs) if name.startswith("uhrc_")]
        for name, value in vars(module).items():
            if not (name.startswith("uhrc_") and inspect.isfunction(value)):
                continue
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"hooks are {', '.join(known)}"
                raise PluginError(f"{label} defines {name}, which is no hook of uhrc-core; {hint}")
            if self._manager.parse_hookimpl_opts(module, name) is None:
                raise PluginError(
                    f"{label} defines {name} without @hookimpl, so it would never be called; "
                    "decorate it with uhrc_core.registry.hookspecs.hookimpl"
                )


def _answer(
    impl: pluggy.HookImpl, hook: str, kind: type[Record], *args: object
) -> Sequence[Record] | None:
    """One plugin's records, each checked in all its fields; ``None`` is an answer about ``args``.

    So is a ConfigError; what else it raises is the plugin's fault.
    """
    advice = "; hooks only declare: report this to the plugin's author"
    passes = (ConfigError,) if args else ()
    with plugin_code(f"{impl.plugin_name}: {hook} raised", advice, passes):
        answer: Any = impl.function(*args[: len(impl.argnames)])
        if answer is None and args:
            return None
        mistake = _mistake(answer, kind)
    if mistake:
        raise PluginError(f"{impl.plugin_name}: {hook} {mistake}")
    return answer


def _mistake(answer: object, kind: type[Any]) -> str | None:
    records = cast("Sequence[object]", answer) if isinstance(answer, list | tuple) else [answer]
    if records is not answer or not all(isinstance(each, kind) for each in records):
        return f"must return a list of {kind.__name__}, got {answer!r}"
    found = (mistake_in(record, kind) for record in records)
    return next((f"returned a wrong {kind.__name__}: {each}" for each in found if each), None)


def _check_component(label: str, spec: ComponentSpec) -> None:
    size_key = getattr(spec.params_model, "size_key", None)
    if size_key not in spec.params_model.model_fields:
        raise PluginError(
            f"{label}: {spec.params_model.__name__}.size_key = {size_key!r}, which is no key of "
            f"[components.{spec.name}]; name the one that sets the pool's size"
        )
    if mistake := eviction_order_mistake({spec.kind: spec.eviction_priority}, exact=True):
        raise PluginError(f"{label}: component {spec.name!r}: {mistake}")


def _check_models(label: str, models: Iterable[type[ConfigTable]]) -> None:
    """A type that JSON Schema cannot say would break `uhrc schema` for everyone."""
    for model in models:
        with plugin_code(f"{label}: the JSON Schema of {model.__name__} raised"):
            model.model_rebuild()
            model.model_json_schema()


def _check_new(label: str, known: Mapping[str, object], records: Iterable[Named]) -> None:
    names = set(known)
    for record in records:
        if record.name in names:
            raise PluginError(
                f"{label} declares {type(record).__name__} {record.name!r}, which exists already; "
                "rename it"
            )
        names.add(record.name)
