"""A comparison on screen: what was said, and a table with one column a run, one line a figure."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from uhrc_engine.report.summary import Comparison, Questions, RunSummary
from uhrc_engine.workload.drive import Talks


def transcript(talks: Talks, questions: Questions) -> Text:
    """Questions and answers, by conversation."""
    text = Text()
    for turn in talks.turns:
        if turn.number == 0:
            text.append(f"conversation {turn.conversation + 1}\n", style="bold")
        text.append(f"  {questions[turn.conversation][turn.number]}\n", style="dim")
        text.append(f"    {' '.join(turn.text.split())}\n")
    return text


def comparison_table(comparison: Comparison) -> Table:
    """The figures of all runs; the last line compares each run's answers with the first run's."""
    turns = comparison.talks[0].turns
    talks = {turn.conversation for turn in turns}
    table = Table(
        title=comparison.runs[0].model,
        caption=f"{len(turns)} turns of {len(talks)} interleaved conversations. TTFT: seconds to "
        "the first token, waiting for the other conversations included. Served tokens: prompts, "
        "cached or not, and answers. Loading and compiling are not in any figure.",
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
    return (
        {
            "prompt tokens": f"{run.prompt_tokens:,}",
            "cached tokens": f"{run.cached_tokens:,}",
            "hit rate": f"{run.hit_rate:.1%}",
            "TTFT p50": f"{run.ttft_p50_s:.2f} s",
            "TTFT p99": f"{run.ttft_p99_s:.2f} s",
            "output tokens/s": f"{run.output_tokens_per_s:.1f}",
            "served tokens/s": f"{run.total_tokens_per_s:,.0f}",
            "run time": f"{run.wall_s:.1f} s",
            "evicted tokens": f"{run.evicted_tokens:,}",
            "retractions": f"{run.retractions:,}",
        }
        | _window_figures(run)
        | _state_figures(run)
        | _right_figures(run)
    )


def _window_figures(run: RunSummary) -> dict[str, str]:
    if not run.window_tokens_peak:
        return {}
    return {
        "window tokens evicted": f"{run.window_evicted_tokens:,}",
        "window pool, at most": f"{run.window_tokens_peak:,}",
    }


def _state_figures(run: RunSummary) -> dict[str, str]:
    if not run.slots_peak:
        return {}
    return {
        "snapshots taken": f"{run.snapshots:,}",
        "states cloned": f"{run.cow_clones:,}",
        "slots at the peak": f"{run.slots_peak:,}",
    }


def _right_figures(run: RunSummary) -> dict[str, str]:
    return {} if run.accuracy is None else {"right answers": f"{run.accuracy:.1%}"}
