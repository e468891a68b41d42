"""The ``[engine]`` table: the model, the shapes of steps, how many requests run at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from uhrc_core.registry.layout import FloatDtype
from uhrc_core.registry.tables import ConfigPath, ConfigTable, PositiveInt

Sizes = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class EngineTable(ConfigTable):
    """The model, and the shapes of its steps: each combination of rows and widths is compiled."""

    model: Annotated[Literal["smollm2"] | ConfigPath | None, Field(union_mode="left_to_right")] = (
        Field(
            default=None,
            description="A Hugging Face directory or a .gguf file, relative to this file; "
            '"smollm2" is SmolLM2-135M-Instruct, downloaded once.',
        )
    )
    random_weights_seed: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Weights made from this seed: of the model's directory only config.json is "
        "read. For measuring, not for talking.",
    )
    decode_rows: Sizes = Field(
        default=(1, 4, 8),
        description="Rows of a decode step that are compiled; the largest bounds the requests that "
        "run at once. With a single entry, the bits of a token do not depend on what else runs.",
    )
    prefill_rows: PositiveInt = Field(
        default=1, description="Requests whose prompts are computed in the same step."
    )
    prefill_widths: Sizes | None = Field(
        default=None,
        description="Prompt tokens per row of a prefill step that are compiled, beside "
        "scheduler.chunked_prefill_size. Default: 64.",
    )
    headroom_tokens: PositiveInt = Field(
        default=64,
        description="Tokens kept back at an admission for each running request, and for the new "
        "one, beyond those it has.",
    )
    dtype: FloatDtype = Field(
        default="float32", description="Of the weights; the KV pool has its own setting."
    )
