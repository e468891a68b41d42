"""RecurrentParams: the table ``[components.recurrent]``."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import Field

from uhrc_core.plugin_api import (
    EXTRA_BUFFER,
    TRACK_ON_PAGES,
    ComponentParams,
    ConfigError,
    FloatDtype,
    Platform,
    PositiveInt,
    RestOfConfig,
)


class RecurrentParams(ComponentParams):
    """The pool of recurrent states: one slot is the whole state of one sequence position."""

    size_key = "num_slots"
    size_advice = "raise it"

    backend: str | None = Field(
        default=None,
        description="Kind of recurrent layer: kda, gdn, gla, or one of a plugin; unset: the "
        "model's.",
    )
    num_slots: PositiveInt | None = Field(
        default=None,
        description="Pool size per dp rank; unset: what rest.cache.max_requests requests own, and "
        "snapshot_headroom on top.",
    )
    snapshot_headroom: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0,
        description="Where num_slots is unset: slots for snapshots, per slot a request owns.",
    )
    enable_extra_buffer: bool = Field(
        default=False,
        description="Publish snapshots from page-aligned track slots; needed with page_size > 1.",
    )
    track_interval: PositiveInt | None = Field(
        default=None,
        description="Tokens between snapshots, a multiple of cache.page_size; unset: "
        "scheduler.chunked_prefill_size, else cache.page_size.",
    )
    overlap_steps: bool = Field(
        default=False,
        description="The engine dispatches a step before the last one is done: two track slots a "
        "request instead of one.",
    )
    dtype: FloatDtype = Field(
        default="float32", description="Type of the conv states; temporal states are float32."
    )
    platform: Platform = Field(default="cpu", description="Whose physical layout the pool has.")

    @property
    def num_tracks(self) -> int:
        """Track slots a running request owns beside its running slot."""
        return (2 if self.overlap_steps else 1) if self.enable_extra_buffer else 0

    @property
    def request_owned_slots(self) -> int:
        return 1 + self.num_tracks

    @property
    def num_units(self) -> int | None:
        return self.num_slots

    def with_num_units(self, num_units: int, page_size: int) -> Self:
        return self.model_copy(update={"num_slots": num_units})

    def num_units_min(self, page_size: int, max_context_len: int) -> int:
        """What one request owns, and the snapshot it is cloned from."""
        return self.request_owned_slots + 1

    @property
    def backend_name(self) -> str | None:
        return self.backend

    def settled(self, rest: RestOfConfig) -> Self:
        kinds = sorted({layer.backend for layer in rest.layers})
        if self.backend is not None and kinds and kinds != [self.backend]:
            raise ConfigError(f"backend = {self.backend!r}: the model's layers are {kinds[0]}")
        owned = rest.cache.max_requests * self.request_owned_slots
        chunk, page_size = rest.scheduler.chunked_prefill_size, rest.cache.page_size
        interval = self.track_interval or chunk or page_size
        if interval % page_size and not rest.cache.disable_radix_cache:
            unset = "" if self.track_interval else ", from scheduler.chunked_prefill_size"
            raise ConfigError(
                f"track_interval = {interval}{unset}: not whole pages of cache.page_size = "
                f"{page_size}; set a multiple"
            )
        return self.model_copy(
            update={
                "backend": self.backend or next(iter(kinds), None),
                "track_interval": interval,
                "num_slots": self.num_slots or owned + math.ceil(owned * self.snapshot_headroom),
            }
        )

    def features(self, page_size: int) -> frozenset[str]:
        holds = {
            EXTRA_BUFFER: self.enable_extra_buffer,
            TRACK_ON_PAGES: (self.track_interval or page_size) % page_size == 0,
        }
        return frozenset(name for name, holds_true in holds.items() if holds_true)
