"""Fault injection: an allocator whose k-th allocation answers ``None``, as a full pool's does."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
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
    count = AllocationCount()

    def counted(allocate: Callable[..., IndexArray | None], size_at: int) -> Callable[..., Any]:
        def call(*args: int) -> IndexArray | None:
            count.calls += args[size_at] > 0
            if args[size_at] and count.calls == k:
                count.failed = True
                return None
            return allocate(*args)

        return call

    # `alloc` is an `extend` of nothing.
    extend, take_pages = counted(allocator.extend, 2), counted(allocator.take_pages, 0)
    with patch.multiple(allocator, extend=extend, take_pages=take_pages):
        yield count
