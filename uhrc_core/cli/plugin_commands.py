"""The commands that plugins add, tried out one by one: typer builds all of them at every call."""

from __future__ import annotations

from collections.abc import Callable

import typer
from typer.main import get_command

from uhrc_core.boundary import plugin_code
from uhrc_core.errors import PluginError
from uhrc_core.registry.registry import Registry


def plugin_commands(registry: Registry) -> tuple[dict[str, Callable[..., None]], list[str]]:
    """The functions that typer can make a command of, and what is wrong with the others."""
    usable: dict[str, Callable[..., None]] = {}
    faults: list[str] = []
    for name, spec in registry.commands.items():
        try:
            with plugin_code(f"{registry.owners[name]}: command {name!r} raised"):
                trial = typer.Typer(add_completion=False)
                trial.command(name)(spec.function)
                get_command(trial)
        except PluginError as error:
            faults.append(str(error))
        else:
            usable[name] = spec.function
    return usable, faults
