"""RunSummary: the figures of one run; Comparison: the runs of one model side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from uhrc_engine.engine import EngineStats
from uhrc_engine.workload.drive import Talks

Questions = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a workload.

    Attributes:
        model: what ran.
        cache: how prefixes were kept.
        prompt_tokens, cached_tokens: of all turns; the second did not have to be computed.
        output_tokens: generated.
        ttft_p50_s, ttft_p99_s: percentiles over the turns, by nearest rank.
        wall_s: seconds from the first question to the last answer.
        evicted_tokens: FULL tokens the cache gave up during the run.
        window_evicted_tokens: SWA tokens it gave up, with their FULL tokens or before them.
        window_tokens_peak: most SWA tokens in use at once, the tree's included; 0 without any.
        retractions: how often a request lost its memory to others.
        snapshots: recurrent states published to the tree.
        cow_clones: recurrent states copied for a hit.
        slots_peak: most recurrent slots in use at once, the tree's included; 0 without any.
        accuracy: share of right answers; ``None`` where there are no right ones.
    """

    model: str
    cache: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_p50_s: float
    ttft_p99_s: float
    wall_s: float
    evicted_tokens: int
    window_evicted_tokens: int
    window_tokens_peak: int
    retractions: int
    snapshots: int
    cow_clones: int
    slots_peak: int
    accuracy: float | None

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt tokens, cached ones included, and output tokens."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s

    def to_json(self) -> dict[str, Any]:
        """All figures, the derived ones included."""
        return asdict(self) | {
            "hit_rate": self.hit_rate,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
        }


def summarize(model: str, cache: str, talks: Talks, stats: EngineStats) -> RunSummary:
    """The figures of a run of at least one turn, on an engine that has run nothing else."""
    ttfts = [turn.ttft_s for turn in talks.turns]
    return RunSummary(
        model=model,
        cache=cache,
        prompt_tokens=sum(turn.prompt_tokens for turn in talks.turns),
        cached_tokens=sum(turn.cached_tokens for turn in talks.turns),
        output_tokens=sum(len(turn.token_ids) for turn in talks.turns),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        wall_s=talks.wall_s,
        evicted_tokens=stats.cache.evicted.num_tokens_evicted,
        window_evicted_tokens=stats.cache.evicted.swa_num_tokens_evicted,
        window_tokens_peak=stats.window_tokens_peak,
        retractions=stats.retractions,
        snapshots=stats.cache.inserted_num_snapshots,
        cow_clones=stats.cow_clones,
        slots_peak=stats.slots_peak,
        accuracy=_share([turn.right for turn in talks.turns if turn.right is not None]),
    )


def _share(verdicts: Sequence[bool]) -> float | None:
    return sum(verdicts) / len(verdicts) if verdicts else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` per cent of the values do not exceed."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of the same conversations.

    Attributes:
        runs: the first one is what the others are compared with.
        talks: what was said, in the order of ``runs``.
        questions: what was asked, by conversation and turn.
    """

    runs: tuple[RunSummary, ...]
    talks: tuple[Talks, ...]
    questions: Questions

    @property
    def differing_turns(self) -> tuple[tuple[int, int], ...]:
        """(conversation, number) of every turn whose answer is not the same token ids in all runs.

        After a first difference the prompts of that conversation differ, too.
        """
        columns = zip(*(talk.turns for talk in self.talks), strict=True)
        return tuple(
            (turns[0].conversation, turns[0].number)
            for turns in columns
            if len({turn.token_ids for turn in turns}) > 1
        )

    def to_json(self) -> dict[str, Any]:
        """Figures and turns of every run, and whether the answers were the same."""
        return {
            "identical_outputs": not self.differing_turns,
            "differing_turns": [list(turn) for turn in self.differing_turns],
            "runs": [
                run.to_json() | {"turns": [asdict(turn) for turn in talk.turns]}
                for run, talk in zip(self.runs, self.talks, strict=True)
            ],
        }
