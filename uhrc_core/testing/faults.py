"""Fault injection: an allocator whose k-th allocation answers ``None``, as a full pool's does."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from uhrc_core.indices import IndexArray
from uhrc_core.pools import PagedIndexAllocator


@dataclass(slots=True)
class AllocationCount:
    """Allocations asked for so far, and whether the one that must fail was among them."""

    calls: int = 0
    failed: bool = False


@contextmanager
def failing_allocation(
    allocator: PagedIndexAllocator, k: int
) -> Generator[AllocationCount, None, None]:
    """While open, the k-th allocation (from 1) of ``allocator`` answers ``None``, all others do
    what they do. Calls for no index at all do not count. Nestable, of several allocators."""
    extend = allocator.extend
    count = AllocationCount()

    def counted(
        length: int, last_index: int, num_indices: int, dp_rank: int = 0
    ) -> IndexArray | None:
        count.calls += num_indices > 0
        if num_indices and count.calls == k:
            count.failed = True
            return None
        return extend(length, last_index, num_indices, dp_rank)

    with patch.object(allocator, "extend", counted):  # `alloc` is an `extend` of nothing
        yield count
