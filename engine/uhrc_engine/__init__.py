"""The reference engine of UHRC: real models on a prefix cache.

eng = Engine.from_pretrained("model.gguf", "cache.toml")
[done] = eng.generate([Request(token_ids=[1, 2, 3], max_new_tokens=8)])

Names are imported at first use: the commands and the config tables do without jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uhrc_engine.engine import Engine, EngineStats, StepOutput, TokenEvent
    from uhrc_engine.request import (
        Completion,
        EngineBusyError,
        EngineError,
        FinishReason,
        InvalidRequestError,
        OutOfPagesError,
        Request,
    )

__all__ = [
    "Completion",
    "Engine",
    "EngineBusyError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "InvalidRequestError",
    "OutOfPagesError",
    "Request",
    "StepOutput",
    "TokenEvent",
]

_IN_ENGINE = ("Engine", "EngineStats", "StepOutput", "TokenEvent")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "engine" if name in _IN_ENGINE else "request"
    return vars(import_module(f"{__name__}.{module}"))[name]
