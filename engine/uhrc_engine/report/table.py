"""A comparison as a table: one column a run, one line a figure."""

from __future__ import annotations

from rich.table import Table

from uhrc_engine.report.summary import Comparison, RunSummary


def comparison_table(comparison: Comparison) -> Table:
    """The figures of all runs; the last line compares each run's answers with the first run's."""
    turns = comparison.talks[0].turns
    table = Table(
        title=f"{comparison.runs[0].model}: {len(turns)} turns of "
        f"{len({turn.conversation for turn in turns})} interleaved conversations",
        caption="TTFT: time to first token, waiting for the other conversations included",
    )
    table.add_column("")
    for run in comparison.runs:
        table.add_column(f"cache: {run.cache}", justify="right")
    lines = [_figures(run) for run in comparison.runs]
    for name in lines[0]:
        table.add_row(name, *(line[name] for line in lines))
    table.add_row("identical outputs", *_verdicts(comparison))
    return table


def _verdicts(comparison: Comparison) -> list[str]:
    first, *others = [[turn.token_ids for turn in talk.turns] for talk in comparison.talks]
    return ["", *("yes" if answers == first else "NO" for answers in others)]


def _figures(run: RunSummary) -> dict[str, str]:
    return {
        "prompt tokens": f"{run.prompt_tokens:,}",
        "cached tokens": f"{run.cached_tokens:,}",
        "hit rate": f"{run.hit_rate:.1%}",
        "TTFT p50": f"{run.ttft_p50_s:.2f} s",
        "TTFT p99": f"{run.ttft_p99_s:.2f} s",
        "output tokens/s": f"{run.output_tokens_per_s:.1f}",
        "total tokens/s": f"{run.total_tokens_per_s:,.0f}",
        "run time": f"{run.wall_s:.1f} s",
        "evicted tokens": f"{run.evicted_tokens:,}",
        "retractions": f"{run.retractions:,}",
    }
