"""The main job: the same conversations held without and with prefix reuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from uhrc_core.config import Config
from uhrc_engine.assembly import EngineParts, build_parts
from uhrc_engine.config import EngineTable
from uhrc_engine.engine import Engine
from uhrc_engine.report.summary import Comparison, RunSummary, summarize
from uhrc_engine.tokenizer import Tokenizer
from uhrc_engine.weights import load_pretrained
from uhrc_engine.workload.config import Script, WorkloadTable
from uhrc_engine.workload.drive import Talks, hold_conversations


class Observer(Protocol):
    """Is told how far the job is."""

    def phase(self, name: str, total: int | None) -> None:
        """A new phase begins; ``total`` steps long, if that is known."""
        ...

    def advance(self) -> None:
        """A step of the phase is done."""
        ...


def compare(
    path: Path, config: Config, scripts: Sequence[Script], observer: Observer
) -> Comparison:
    """Load the model once and run the scripts twice, on the same compiled steps and pools.

    Raises:
        WeightsError, ConfigError, PluginError: the engine cannot be set up.
        UHRCError: a request cannot run.
    """
    observer.phase("load the model", None)
    pretrained = load_pretrained(path, config.table(EngineTable).dtype)
    tokenizer = Tokenizer.from_pretrained(path)
    parts = build_parts(pretrained, config)
    observer.phase("compile the steps", None)
    Engine(parts).warmup()

    def run(label: str, parts: EngineParts) -> tuple[RunSummary, Talks]:
        observer.phase(f"cache: {label}", sum(len(script.questions) for script in scripts))
        engine = Engine(parts)
        max_new_tokens = config.table(WorkloadTable).max_new_tokens
        talks = hold_conversations(
            engine, tokenizer, scripts, max_new_tokens, lambda turn: observer.advance()
        )
        return summarize(path.stem, label, talks, engine.stats()), talks

    runs = [run("none", parts.without_reuse()), run(_label(config), parts)]
    return Comparison(tuple(r for r, _ in runs), tuple(t for _, t in runs))


def _label(config: Config) -> str:
    if config.cache.disable_radix_cache:
        return "none, as configured"
    return "radix tree" if config.cache.enable_unified_radix_tree else "plain radix tree"
