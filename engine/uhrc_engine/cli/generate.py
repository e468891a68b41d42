"""``uhrc generate``: one prompt in, its continuation out."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from uhrc_core.cli.options import with_config
from uhrc_core.config.config import Config
from uhrc_engine.cli.loading import MaxNewTokens, Seed, Temperature, TopP, load_engine

Prompt = Annotated[str, typer.Option(help="The text to continue; - reads standard input.")]


@with_config
def generate(
    config: Config,
    prompt: Prompt,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
) -> None:
    """Continue a text with the model."""
    text = sys.stdin.read() if prompt == "-" else prompt
    engine, tokenizer = load_engine(config)

    from uhrc_engine.request import Request

    request = Request(
        tokenizer.encode(text, add_special_tokens=True),
        max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_token_ids=tokenizer.eos_token_ids,
    )
    pieces = tokenizer.stream()
    for event in engine.stream([request]):
        sys.stdout.write(pieces.push(event.token_id))
        sys.stdout.flush()
    sys.stdout.write(pieces.finish() + "\n")
