"""What the commands share: the model a config names, on screen while it loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from uhrc_core.config.config import Config
from uhrc_core.errors import ConfigError
from uhrc_engine.config import EngineTable
from uhrc_engine.request import InvalidRequestError, Request, check_request

if TYPE_CHECKING:
    from uhrc_engine.engine import Engine
    from uhrc_engine.tokenizer import Tokenizer

stderr = Console(stderr=True, highlight=False)


def _checked(param: typer.CallbackParam, value: float) -> float:
    """The value of the request's field of that name; refused before any model is loaded."""
    fields: dict[str, Any] = {"max_new_tokens": 1, str(param.name): value}
    try:
        check_request(Request([0], **fields), vocab_size=1)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error)) from None
    return value


MaxNewTokens = Annotated[
    int, typer.Option(callback=_checked, help="Length of an answer, at most; 1 or more.")
]
Temperature = Annotated[
    float, typer.Option(callback=_checked, help="0 is greedy; more is more random.")
]
TopP = Annotated[
    float, typer.Option(callback=_checked, help="Nucleus sampling, in (0, 1]; 1 keeps all.")
]
Seed = Annotated[
    int, typer.Option(callback=_checked, help="Of the random draws, from 0 to 2**32 - 1.")
]


def model_path(config: Config) -> Path:
    """Where the model of ``[engine]`` lies, after downloading it if it is the built-in one.

    Raises:
        ConfigError: no model is named.
        FetchError: the download failed.
    """
    model = config.table(EngineTable).model
    if model is None:
        raise ConfigError(
            "engine.model: not set; name a Hugging Face directory or a .gguf file, as in "
            '--set engine.model=path/to/model, or "smollm2"'
        )
    if model == "smollm2":
        from uhrc_engine.weights.smollm2 import fetch_smollm2

        return fetch_smollm2()
    return Path(model)


def load_engine(config: Config) -> tuple[Engine, Tokenizer]:
    """The engine and the tokenizer of the config's model, ready to run."""
    path = model_path(config)
    with stderr.status("loading the model …") as status:
        from uhrc_engine.engine import Engine
        from uhrc_engine.tokenizer import Tokenizer

        engine = Engine.from_pretrained(path, config)
        tokenizer = Tokenizer.from_pretrained(path)
        status.update("compiling its steps …")
        engine.warmup()
    return engine, tokenizer
