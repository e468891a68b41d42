"""The typer application: the core's commands and those of the plugins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from uhrc_core import __version__
from uhrc_core.cli.commands import check, describe, plugins, schema
from uhrc_core.cli.new_plugin import new_plugin
from uhrc_core.cli.plugin_commands import plugin_commands
from uhrc_core.errors import PluginError
from uhrc_core.registry.catalog import PluginCatalog, installed_plugins

CORE_COMMANDS: dict[str, Callable[..., None]] = {
    "plugins": plugins,
    "check": check,
    "schema": schema,
    "describe": describe,
    "new-plugin": new_plugin,
}


def make_app() -> typer.Typer:
    """Collect the commands. A plugin that cannot be loaded costs one line on stderr."""
    app = typer.Typer(
        help="Assemble, check and inspect a Unified Hybrid Radix Cache.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name, function in CORE_COMMANDS.items():
        app.command(name)(function)
    for name, function in _plugin_commands().items():
        app.command(name)(function)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"uhrc {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def _plugin_commands() -> dict[str, Callable[..., None]]:
    stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        catalog = installed_plugins()
    except PluginError as error:
        stderr.print(f"warning: {error}", style="yellow")
        catalog = PluginCatalog([])
    registry, broken = catalog.load_each(catalog.names)
    commands, faults = plugin_commands(registry)
    for message in dict.fromkeys([*map(str, broken.values()), *faults]):
        stderr.print(f"warning: {message}", style="yellow")
    return {name: function for name, function in commands.items() if name not in CORE_COMMANDS}
