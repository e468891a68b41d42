"""The ``uhrc`` command. Needs the extra ``uhrc-core[cli]`` (typer, rich)."""

from __future__ import annotations

import sys

from uhrc_core.errors import UHRCError


def main() -> None:
    """Entry point of the ``uhrc`` script."""
    try:
        from uhrc_core.cli.app import make_app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"uhrc: the command line needs {missing}; run: pip install 'uhrc-core[cli]'")
    try:
        make_app()()
    except UHRCError as error:
        sys.exit(f"uhrc: {error}")
