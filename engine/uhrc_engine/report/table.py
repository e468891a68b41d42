"""The table of a comparison: one row a run."""

from __future__ import annotations

from rich.table import Table

from uhrc_engine.report.summary import Comparison, RunSummary

_COLUMNS = (
    "model",
    "cache",
    "prompt\ntokens",
    "cached\ntokens",
    "hit\nrate",
    "TTFT p50\ns",
    "TTFT p99\ns",
    "output\ntok/s",
    "total\ntok/s",
    "evicted\ntokens",
    "same\noutput",
)


def comparison_table(comparison: Comparison) -> Table:
    """Rows in the order of the runs; the last column says whether a run's answers equal the
    first run's."""
    table = Table(title="The same conversations, without and with prefix reuse")
    for i, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right")
    first = comparison.talks[0].turns
    for i, (run, talks) in enumerate(zip(comparison.runs, comparison.talks, strict=True)):
        equal = [turn.token_ids for turn in talks.turns] == [turn.token_ids for turn in first]
        table.add_row(*_cells(run), "–" if i == 0 else "yes" if equal else "NO")
    return table


def _cells(run: RunSummary) -> list[str]:
    return [
        run.model,
        run.cache,
        f"{run.prompt_tokens:,}",
        f"{run.cached_tokens:,}",
        f"{run.hit_rate:.1%}",
        f"{run.ttft_p50_s:.2f}",
        f"{run.ttft_p99_s:.2f}",
        f"{run.output_tokens_per_s:.1f}",
        f"{run.total_tokens_per_s:.0f}",
        f"{run.evicted_tokens:,}",
    ]
