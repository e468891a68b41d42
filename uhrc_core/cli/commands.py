"""The core's commands."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from uhrc_core.assemble import cache_class
from uhrc_core.cli.describe import description, print_description
from uhrc_core.cli.options import fail, with_config
from uhrc_core.cli.plugin_commands import plugin_commands
from uhrc_core.config.config import Config
from uhrc_core.config.resolve import resolve
from uhrc_core.config.schema import config_schema
from uhrc_core.errors import PluginError
from uhrc_core.registry.catalog import PluginCatalog, PluginEntry, installed_plugins

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plugins(as_json: Json = False) -> None:
    """List the installed plugins and what is wrong with any."""
    try:
        catalog = installed_plugins()
    except PluginError as error:
        fail(error)
    modules = {(entry.distribution, entry.target): entry for entry in catalog.entries}
    rows = [_plugin_row(catalog, entry) for entry in modules.values()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("names", "distribution", "version", "module", "brings")
    for row in rows:
        brings = "\n".join(row["brings"]) or "-"
        cells = (row["distribution"], row["version"], row["module"])
        table.add_row("\n".join(row["names"]), *cells, brings)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table if rows else "no plugins; run: pip install uhrc-full")
    for problem in dict.fromkeys(row["problem"] for row in rows if row["problem"]):
        console.print(problem)


@with_config
def check(config: Config) -> None:
    """Check a config: print every problem with its key."""
    resolved = resolve(config)
    names = ", ".join(part.spec.name for part in resolved.components)
    kind = cache_class(resolved).__name__
    typer.echo(f"ok: {kind}, page_size {config.cache.page_size}, components {names}")


def schema() -> None:
    """Print the JSON Schema of the config, installed plugins included."""
    catalog = installed_plugins()
    registry, _ = catalog.load_each(catalog.names)
    typer.echo(json.dumps(config_schema(registry), indent=2))


@with_config
def describe(config: Config, as_json: Json = False) -> None:
    """Show what a config assembles: components, pools with bytes, kernels."""
    facts = description(resolve(config))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_description(facts)


def _plugin_row(catalog: PluginCatalog, entry: PluginEntry) -> dict[str, Any]:
    """One module with all its names; imports it."""
    names = catalog.names_of(entry)
    registry, broken = catalog.load_each(names)
    problems = dict.fromkeys([*map(str, broken.values()), *plugin_commands(registry)[1]])
    return {
        "names": list(names),
        "distribution": entry.distribution,
        "version": entry.version,
        "module": entry.target,
        "brings": registry.brought,
        "problem": "\n".join(problems) or None,
    }
