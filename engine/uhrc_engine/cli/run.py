"""``uhrc run``: the same conversations without and with prefix reuse, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from uhrc_core.cli.options import with_config
from uhrc_core.config.config import Config
from uhrc_core.errors import ConfigError
from uhrc_engine.cli.loading import model_path, stderr
from uhrc_engine.workload.config import WorkloadTable

JsonFile = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, help="Write figures and answers there.")
]


@with_config
def run(config: Config, json_file: JsonFile = None) -> None:
    """Compare runs without and with the cache.

    The conversations that the config names are held twice, on the same compiled steps. Leaves with
    status 1 when the answers differ.
    """
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"--json {json_file}: the folder does not exist; make it first")
    path = model_path(config)
    try:
        with ProgressBars() as bars:
            from uhrc_engine.workload.compare import compare

            comparison = compare(path, config, bars)
    except KeyboardInterrupt:
        stderr.print("interrupted; nothing was written")
        raise typer.Exit(130) from None

    from uhrc_engine.report.table import comparison_table, transcript

    if json_file is not None:
        json_file.write_text(json.dumps(comparison.to_json(), indent=2) + "\n", encoding="utf-8")
    stdout = Console(highlight=False)
    if config.table(WorkloadTable).source == "conversations":
        stdout.print(transcript(comparison.talks[-1], comparison.questions))
    stdout.print(comparison_table(comparison))
    if comparison.differing_turns:
        stderr.print(f"answers differ in (conversation, turn) {comparison.differing_turns}")
        raise typer.Exit(1)


class ProgressBars:
    """One line a phase on stderr: a bar where the length is known, else a spinner."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="·"),
            TextColumn("{task.description:<20}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=stderr,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()
        self._progress.stop()

    def phase(self, name: str, total: int | None) -> None:
        """See `uhrc_engine.workload.compare.Observer`."""
        self._finish()
        self._task = self._progress.add_task(name, total=total)

    def advance(self) -> None:
        """See `uhrc_engine.workload.compare.Observer`."""
        assert self._task is not None
        self._progress.advance(self._task)

    def _finish(self) -> None:
        """Stop the clock of the phase so far; a spinner becomes a full bar."""
        if self._task is not None:
            if self._progress.tasks[self._task].total is None:
                self._progress.update(self._task, total=1, completed=1)
            self._progress.stop_task(self._task)
