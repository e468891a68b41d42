"""Registry: what the loaded plugins declare, checked and typed.

Every record is checked when its plugin is registered, so that a plugin's mistake is reported with
the plugin's name and not where the record is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from uhrc_core import hookspecs
from uhrc_core.component import ComponentSpec
from uhrc_core.errors import PluginError
from uhrc_core.node import ComponentType
from uhrc_core.plan import LayerKind
from uhrc_core.policies import BUILTIN_POLICIES
from uhrc_core.recurrent import RecurrentBackendSpec, hybrid_layers
from uhrc_core.rules import CORE_RULES, Rule
from uhrc_core.specs import (
    CliCommandSpec,
    ComponentParams,
    ConfigTableSpec,
    EvictionPolicySpec,
)

#: On internal nodes; a leaf's is 0. Not the index of a node's data slot.
EVICTION_PRIORITY = {ComponentType.FULL: 2, ComponentType.SWA: 1, ComponentType.RECURRENT: 0}

Record = TypeVar("Record")
Named = ComponentSpec | RecurrentBackendSpec | EvictionPolicySpec | ConfigTableSpec | CliCommandSpec


class Registry:
    """Declared records by name; filled by `register`, read-only afterwards.

    Attributes:
        components, backends, policies, tables, commands: by name; built-in policies included.
        rules: the core's combination matrix and what plugins add to it.
    """

    def __init__(self) -> None:
        self.components: dict[str, ComponentSpec] = {}
        self.backends: dict[str, RecurrentBackendSpec] = {}
        self.policies = {spec.name: spec for spec in BUILTIN_POLICIES}
        self.tables: dict[str, ConfigTableSpec] = {}
        self.commands: dict[str, CliCommandSpec] = {}
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
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{label}: {error}; correct the hook's parameters") from error
        try:
            self._take_over(label, module, claimed)
        except PluginError:
            self._manager.unregister(module)
            raise

    def _take_over(self, label: str, module: ModuleType, claimed: frozenset[str]) -> None:
        components = self._records(label, "uhrc_component_specs", ComponentSpec)
        backends = self._records(label, "uhrc_recurrent_backends", RecurrentBackendSpec)
        policies = self._records(label, "uhrc_eviction_policies", EvictionPolicySpec)
        tables = self._records(label, "uhrc_config_tables", ConfigTableSpec)
        commands = self._records(label, "uhrc_cli_commands", CliCommandSpec)
        rules = self._records(label, "uhrc_combination_rules", Rule)
        for spec in components:
            _check_component(label, spec)
        for record in (*components, *backends, *policies, *tables):
            if record.name not in claimed:
                raise PluginError(
                    f"{label} declares {record.name!r} but is not registered under that name; add "
                    f"the entry point {record.name} = {module.__name__!r} to its pyproject.toml"
                )
        _check_new(label, self.components, components)
        _check_new(label, self.backends, backends)
        _check_new(label, self.policies, policies)
        _check_new(label, self.tables, tables)
        _check_new(label, self.commands, commands)
        self.components |= {spec.name: spec for spec in components}
        self.backends |= {spec.name: spec for spec in backends}
        self.policies |= {spec.name: spec for spec in policies}
        self.tables |= {spec.name: spec for spec in tables}
        self.commands |= {spec.name: spec for spec in commands}
        self.rules += tuple(rules)

    @property
    def brought(self) -> list[str]:
        """What plugins brought, as ``component full``: kind and name, in a fixed order."""
        named = {
            "component": self.components,
            "backend": self.backends,
            "policy": self.policies.keys() - {spec.name for spec in BUILTIN_POLICIES},
            "table": self.tables,
            "command": self.commands,
        }
        brought = [f"{kind} {name}" for kind, names in named.items() for name in sorted(names)]
        extra_rules = len(self.rules) - len(CORE_RULES)
        knows_models = bool(self._manager.hook.uhrc_layer_kinds.get_hookimpls())
        return brought + ["layer kinds"] * knows_models + ["rules"] * bool(extra_rules)

    def layer_kinds(self, hf_config: Mapping[str, Any]) -> tuple[LayerKind, ...] | None:
        """The layers of a model, or ``None`` when no loaded plugin knows it.

        Raises:
            ConfigError: two recurrent backends claim it, or its attention layers are unknown.
            PluginError: two plugins answer, or one raises.
        """
        hybrid = hybrid_layers(hf_config, tuple(self.backends.values()))
        if hybrid is not None:
            return hybrid
        answers = {
            label: answer
            for label, answer in self._call("uhrc_layer_kinds", hf_config)
            if answer is not None
        }
        if len(answers) > 1:
            raise PluginError(
                f"the model is claimed by {' and '.join(answers)}; limit the plugins with "
                "UHRC_PLUGINS, or uninstall one"
            )
        for label, answer in answers.items():
            return tuple(_checked(label, "uhrc_layer_kinds", LayerKind, answer))
        return None

    def _records(self, label: str, hook: str, kind: type[Record]) -> Sequence[Record]:
        return [
            record
            for owner, answer in self._call(hook)
            if owner == label
            for record in _checked(label, hook, kind, answer)
        ]

    def _call(self, hook: str, *args: object) -> Iterator[tuple[str, Any]]:
        """Each plugin's answer, in order of registration (pluggy's own order is the reverse)."""
        for impl in vars(self._manager.hook)[hook].get_hookimpls():
            try:
                yield impl.plugin_name, impl.function(*args[: len(impl.argnames)])
            except Exception as error:
                raise PluginError(
                    f"{impl.plugin_name}: {hook} raised {type(error).__name__}: {error}; hooks "
                    "only declare: report this to the plugin's author"
                ) from error

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
                    "decorate it with uhrc_core.hookspecs.hookimpl"
                )


def _checked(label: str, hook: str, kind: type[Record], answer: object) -> Sequence[Record]:
    if isinstance(answer, list | tuple) and all(isinstance(item, kind) for item in answer):  # pyright: ignore[reportUnknownVariableType]
        return answer  # pyright: ignore[reportUnknownVariableType]
    raise PluginError(f"{label}: {hook} must return a list of {kind.__name__}, got {answer!r}")


def _check_component(label: str, spec: ComponentSpec) -> None:
    if not issubclass(spec.params_model, ComponentParams):
        raise PluginError(
            f"{label}: params_model of component {spec.name!r} is {spec.params_model.__name__}, "
            "which must derive from uhrc_core.specs.ComponentParams"
        )
    expected = EVICTION_PRIORITY[spec.kind]
    if spec.eviction_priority != expected:
        raise PluginError(
            f"{label}: component {spec.name!r} has eviction_priority {spec.eviction_priority}, but "
            f"{spec.kind.name} needs {expected} (FULL 2 > SWA 1 > RECURRENT 0)"
        )


def _check_new(label: str, known: Mapping[str, object], records: Iterable[Named]) -> None:
    names = set(known)
    for record in records:
        if record.name in names:
            raise PluginError(
                f"{label} declares {type(record).__name__} {record.name!r}, which exists already; "
                "rename it"
            )
        names.add(record.name)
