"""The core's commands."""

from __future__ import annotations

from typing import Annotated

import typer

from uhrc_core.cli.options import with_config
from uhrc_core.config import Config

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plugins(as_json: Json = False) -> None:
    """List the installed plugins and what is wrong with any."""


@with_config
def check(config: Config) -> None:
    """Check a config; print every problem with its key."""
    typer.echo("ok")


def schema() -> None:
    """Print the JSON Schema of the config, the installed plugins' tables included."""


@with_config
def describe(config: Config, as_json: Json = False) -> None:
    """Show what a config assembles: components, pools with bytes, matrix verdict."""
