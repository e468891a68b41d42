"""``uhrc chat``: a conversation in the terminal that shows what each turn reused."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from uhrc_core.cli.options import with_config
from uhrc_core.config.config import Config
from uhrc_engine.cli.loading import MaxNewTokens, Seed, Temperature, TopP, load_engine

if TYPE_CHECKING:
    from uhrc_engine.engine import Engine
    from uhrc_engine.request import Completion, Request
    from uhrc_engine.tokenizer import Tokenizer

System = Annotated[str, typer.Option(help="The system prompt.")]

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer (at the prompt: leaves)"
stdout = Console(highlight=False, markup=False)


@with_config
def chat(
    config: Config,
    system: System = "",
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
) -> None:
    """Talk with the model; shows what each turn reused."""
    engine, tokenizer = load_engine(config)

    from uhrc_engine.request import Request
    from uhrc_engine.workload.conversation import Conversation

    talk = Conversation(tokenizer, system)
    stdout.print(HELP, style="dim")
    while (question := _read_line()) is not None:
        if question == "/reset":
            talk = Conversation(tokenizer, system)
            stdout.print("started over", style="dim")
            continue
        prompt = talk.ask(question)
        room = engine.max_context_len - len(prompt)
        if room < 1:
            stdout.print("the conversation has filled the context; it starts over", style="red")
            talk = Conversation(tokenizer, system)
            continue
        request = Request(
            prompt,
            min(max_new_tokens, room),
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token_ids=tokenizer.eos_token_ids,
        )
        completion = stream_answer(engine, tokenizer, request)
        talk.answer(completion.token_ids)
        stdout.print(_cost(completion), style="dim")


def stream_answer(engine: Engine, tokenizer: Tokenizer, request: Request) -> Completion:
    """Print the answer as it comes; Ctrl-C ends it early and keeps what there is.

    The interrupt is looked at between two steps, so that it cannot tear one apart.
    """
    rid = engine.add_request(request)
    pieces = tokenizer.stream()
    with _deferred_interrupt() as interrupted:
        while True:
            if interrupted():
                engine.abort(rid)
            output = engine.step()
            for event in output.events:
                sys.stdout.write(pieces.push(event.token_id))
                sys.stdout.flush()
            for completion in output.completions:
                sys.stdout.write(pieces.finish() + "\n")
                if completion.error is not None:
                    raise completion.error
                return completion


def _read_line() -> str | None:
    """The next question, not empty; ``None`` at the end of the conversation."""
    while True:
        try:
            line = stdout.input("\nyou> ").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if line == "/exit":
            return None
        if line:
            return line


def _cost(completion: Completion) -> str:
    line = (
        f"[{completion.cached_tokens:,} of {completion.prompt_tokens:,} prompt tokens from the "
        "cache"
    )
    if completion.ttft_s is not None:
        line += f" · first token after {completion.ttft_s:.2f} s"
    return f"{line} · {len(completion.token_ids)} tokens in {completion.latency_s:.2f} s]"


@contextmanager
def _deferred_interrupt() -> Generator[Callable[[], bool]]:
    """Within, Ctrl-C only makes the given function answer True."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
