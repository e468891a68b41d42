"""FullParams: the table ``[components.full]``; KVPoolParams: what any pool of KV says."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from uhrc_core.plugin_api import (
    ComponentParams,
    FloatDtype,
    Platform,
    PositiveInt,
    page_ceil,
    page_floor,
)


class KVPoolParams(ComponentParams):
    """A pool with a place per token."""

    size_key = "num_tokens"

    num_tokens: PositiveInt | None = Field(
        default=None, description="Pool size per dp rank; unset: sized from [memory]."
    )
    dtype: FloatDtype = Field(default="float32", description="Type of the cached values.")
    platform: Platform = Field(
        default="cpu", description="Whose physical layout the pool has; a TPU pads small heads."
    )

    @property
    def num_units(self) -> int | None:
        return self.num_tokens

    def with_num_units(self, num_units: int, page_size: int) -> Self:
        return self.model_copy(update={"num_tokens": page_floor(num_units, page_size)})


class FullParams(KVPoolParams):
    """The KV pool of the full-attention layers."""

    attention: Literal["mha", "gqa", "mla"] | None = Field(
        default=None, description="Kind of attention; checked against the model if both are given."
    )

    def num_units_min(self, page_size: int, max_context_len: int) -> int:
        return page_ceil(max_context_len, page_size)
