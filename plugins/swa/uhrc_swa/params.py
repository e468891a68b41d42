"""SWAParams: the table ``[components.swa]``."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import Field

from uhrc_core.plugin_api import (
    INDEX_MAX,
    ConfigError,
    PositiveInt,
    RestOfConfig,
    page_ceil,
)
from uhrc_full.params import KVPoolParams
from uhrc_swa.window import WindowPlan


class SWAParams(KVPoolParams):
    """The KV pool of the sliding-window layers."""

    size_advice = "raise it, or set scheduler.chunked_prefill_size (or lower it)"

    window_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens a token attends to, itself included; unset: the model's.",
    )
    num_tokens: PositiveInt | None = Field(
        default=None,
        description="Pool size per dp rank; unset: what cache.max_requests requests own, and "
        "prefix_headroom on top, but no more than FULL has where that is set.",
    )
    prefix_headroom: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0,
        description="Where num_tokens is unset: tokens for cached prefixes, per token a request "
        "owns.",
    )
    extend_tokens: PositiveInt | None = Field(
        default=None,
        description="Most tokens one forward adds to a request; unset: "
        "scheduler.chunked_prefill_size, else cache.max_context_len.",
    )

    def plan(self, page_size: int) -> WindowPlan:
        """What a window takes; of a settled table."""
        assert self.window_tokens is not None and self.extend_tokens is not None
        return WindowPlan(self.window_tokens, self.extend_tokens, page_size)

    def num_units_min(self, page_size: int, max_context_len: int) -> int:
        """What one request owns, and the window it has locked in the tree."""
        return self._within(page_size, max_context_len, self.plan(page_size).request_tokens)

    def settled(self, rest: RestOfConfig) -> Self:
        windows = sorted({layer.shape["window_tokens"] for layer in rest.layers})
        if len(windows) > 1:
            raise ConfigError(
                f"window_tokens: the model's layers have windows of {windows}, and one pool frees "
                "all of them at once"
            )
        window = self.window_tokens or next(iter(windows), None)
        if window is None:
            raise ConfigError("window_tokens: not set; set it, or model.hf_config")
        if windows and windows != [window]:
            raise ConfigError(f"window_tokens = {window}: the model's is {windows[0]}")
        cache = rest.cache
        chunk = rest.scheduler.chunked_prefill_size
        if self.extend_tokens is not None and self.extend_tokens < (chunk or 0):
            raise ConfigError(
                f"extend_tokens = {self.extend_tokens}: a forward adds up to "
                f"scheduler.chunked_prefill_size = {chunk} tokens; raise it, or leave it out"
            )
        table = self.model_copy(
            update={
                "window_tokens": window,
                "extend_tokens": self.extend_tokens or chunk or cache.max_context_len,
            }
        )
        if table.num_tokens is None:
            owned = table.plan(cache.page_size).request_owned_tokens
            owned = self._within(cache.page_size, cache.max_context_len, owned)
            num_tokens = math.ceil(cache.max_requests * owned * (1 + self.prefix_headroom))
            least = table.num_units_min(cache.page_size, cache.max_context_len)
            # No more tokens than FULL holds could ever have window data.
            limit = min(INDEX_MAX // cache.dp_size, max(rest.full_tokens or INDEX_MAX, least))
            return table.with_num_units(min(max(num_tokens, least), limit), cache.page_size)
        return table

    def _within(self, page_size: int, max_context_len: int, num_tokens: int) -> int:
        return min(page_ceil(max_context_len, page_size), num_tokens)
