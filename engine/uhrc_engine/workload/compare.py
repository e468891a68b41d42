"""The main job: the same conversations held without and with prefix reuse."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from uhrc_core.config.config import Config
from uhrc_engine.assembly import EngineParts, build_parts
from uhrc_engine.config import EngineTable
from uhrc_engine.engine import Engine
from uhrc_engine.report.summary import Comparison, Questions, RunSummary, summarize
from uhrc_engine.tokenizer import Tokenizer
from uhrc_engine.weights import load_model
from uhrc_engine.workload.config import WorkloadTable
from uhrc_engine.workload.dialogue import make_dialogues
from uhrc_engine.workload.drive import Talks, hold_conversations


class Observer(Protocol):
    """Is told how far the job is."""

    def phase(self, name: str, total: int | None) -> None:
        """A new phase begins; ``total`` steps long, if that is known."""
        ...

    def advance(self) -> None:
        """A step of the phase is done."""
        ...


def compare(path: Path, config: Config, observer: Observer) -> Comparison:
    """Load the model once and hold the conversations twice, on the same compiled steps and pools.

    Raises:
        WeightsError, ConfigError, PluginError: the engine cannot be set up.
        UHRCError: a request cannot run.
    """
    observer.phase("load the model", None)
    pretrained = load_model(path, config.table(EngineTable))
    table = config.table(WorkloadTable)
    written = table.source == "conversations"
    tokenizer = Tokenizer.from_pretrained(path) if written else None
    parts = build_parts(pretrained, config)
    observer.phase("compile the steps", None)
    Engine(parts).warmup()

    def run(label: str, parts: EngineParts) -> tuple[RunSummary, Talks, Questions]:
        dialogues = make_dialogues(table, pretrained.model.vocab_size, tokenizer)
        questions = [dialogue.questions for dialogue in dialogues]
        observer.phase(f"cache: {label}", sum(map(len, questions)))
        engine = Engine(parts)
        talks = hold_conversations(
            engine, dialogues, table.max_new_tokens, lambda turn: observer.advance()
        )
        title = _title(path, config)
        return summarize(title, label, talks, engine.stats()), talks, questions

    runs = [run("none", parts.without_reuse()), run(_label(config), parts)]
    summaries, talks, questions = zip(*runs, strict=True)
    return Comparison(summaries, talks, questions[0])


def _title(path: Path, config: Config) -> str:
    random = config.table(EngineTable).random_weights_seed is not None
    source = config.table(WorkloadTable).source.replace("_", " ")
    return f"{path.stem}{' (random weights)' if random else ''}, {source}"


def _label(config: Config) -> str:
    if config.cache.disable_radix_cache:
        return "none, as configured"
    return "radix tree" if config.cache.enable_unified_radix_tree else "plain radix tree"
