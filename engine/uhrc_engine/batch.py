"""One step's work as the scheduler decided it: which tokens of which requests, stored where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from uhrc_core.cache.holding import StateSlots
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType
from uhrc_engine.request import LiveRequest


class StepKind(StrEnum):
    """A step is one or the other; rows are never mixed."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a step.

    Attributes:
        request: whose tokens these are.
        start: absolute position of the first new token = tokens computed before this step.
        stop: position after the last new token.
        page_tables: by component with one index per token, int32[n_pages]: the pages that hold the
            tokens up to ``stop``, -1 where the component holds nothing of them any more. Views into
            the cache's own: read them before the step is reported as dispatched.
        slots: where the row's recurrent state lies; ``None`` for a model without any.
        samples: whether ``stop`` is the end of the sequence, so that the step gives a new token.
    """

    request: LiveRequest
    start: int
    stop: int
    page_tables: Mapping[ComponentType, IndexArray]
    slots: StateSlots | None
    samples: bool

    @property
    def token_ids(self) -> list[int]:
        """The new tokens, ``stop - start`` of them."""
        return self.request.token_ids[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows, in order of admission; at least one."""

    kind: StepKind
    rows: tuple[BatchRow, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(row.stop - row.start for row in self.rows)

    @property
    def clones(self) -> list[tuple[int, int]]:
        """(source, target) slots of the states to copy before the forward."""
        slots = [row.slots for row in self.rows if row.slots is not None]
        return [(s.clone_src, s.running) for s in slots if s.clone_src is not None]

    @property
    def samples(self) -> bool:
        """Whether any row gives a new token."""
        return any(row.samples for row in self.rows)
