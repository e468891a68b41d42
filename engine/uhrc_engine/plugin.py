"""What uhrc-engine declares: its config tables and its commands."""

from __future__ import annotations

from uhrc_core.registry.hookspecs import hookimpl
from uhrc_core.registry.specs import CliCommandSpec, ConfigTableSpec

UHRC_API = (1, 0)


@hookimpl
def uhrc_config_tables() -> list[ConfigTableSpec]:
    from uhrc_engine.config import EngineTable
    from uhrc_engine.workload.config import WorkloadTable

    return [ConfigTableSpec("engine", EngineTable), ConfigTableSpec("workload", WorkloadTable)]


@hookimpl
def uhrc_cli_commands() -> list[CliCommandSpec]:
    from uhrc_engine.cli.chat import chat
    from uhrc_engine.cli.generate import generate
    from uhrc_engine.cli.run import run

    return [
        CliCommandSpec("generate", generate),
        CliCommandSpec("chat", chat),
        CliCommandSpec("run", run),
    ]
