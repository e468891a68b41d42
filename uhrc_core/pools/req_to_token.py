"""ReqToTokenPool: which pool index holds each token of each running request."""

from __future__ import annotations

import numpy as np

from uhrc_core.errors import RequestError
from uhrc_core.indices import IndexArray


class ReqToTokenPool:
    """A table int32[max_requests, max_context_len]: one row a running request.

    Rows are handed out lowest first, the last freed row next; the table owns its memory and
    `indices` returns views that the next `write` to the row changes.
    """

    def __init__(self, max_requests: int, max_context_len: int) -> None:
        self.max_requests = max_requests
        self.max_context_len = max_context_len
        self._table = np.zeros((max_requests, max_context_len), np.int32)
        self._free_rows = list(range(max_requests - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows no request holds."""
        return len(self._free_rows)

    @property
    def free_rows(self) -> tuple[int, ...]:
        """Rows no request holds, the next one last."""
        return tuple(self._free_rows)

    def alloc(self) -> int | None:
        """A row, or ``None`` when all are taken."""
        return self._free_rows.pop() if self._free_rows else None

    def free(self, row: int) -> None:
        if not 0 <= row < self.max_requests or row in self._free_rows:
            raise RequestError(f"row {row} of ReqToTokenPool is not in use")
        self._free_rows.append(row)

    def write(self, row: int, start: int, indices: IndexArray) -> None:
        """Put int32[n] ``indices`` at token positions ``[start, start + n)`` of ``row``."""
        self._table[row, start : start + len(indices)] = indices

    def write_range(self, row: int, start: int, first: int, num_tokens: int) -> None:
        """As `write` of the ``num_tokens`` consecutive indices that begin with ``first``."""
        if num_tokens == 1:
            self._table[row, start] = first
        else:
            self._table[row, start : start + num_tokens] = range(first, first + num_tokens)

    def indices(self, row: int, start: int, stop: int) -> IndexArray:
        """int32[stop - start], a view."""
        return self._table[row, start:stop]

    def reset(self) -> None:
        self._free_rows = list(range(self.max_requests - 1, -1, -1))
