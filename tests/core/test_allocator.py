"""Allocators and the ledger: one owner for every page, checked at each change of hands."""

from __future__ import annotations

import numpy as np
import pytest

from uhrc_core.errors import InvalidIndexError, InvalidParamsError, RequestError
from uhrc_core.pools import PagedTokenToKVPoolAllocator, ReqToTokenPool, TokenToKVPoolAllocator


def test_extend_fills_the_last_page_before_it_takes_a_new_one() -> None:
    pool = PagedTokenToKVPoolAllocator(16, 4, 1)
    first = pool.alloc(6)
    assert first is not None and first.tolist() == [0, 1, 2, 3, 4, 5]
    assert pool.available_size(0) == 8
    more = pool.extend(6, 5, 3)
    assert more is not None and more.tolist() == [6, 7, 8]
    assert pool.available_size(0) == 4 and pool.active_size(0) == 12
    pool.free(np.concatenate([first, more]))
    assert pool.available_size(0) == 16


def test_a_full_pool_answers_none_and_is_unchanged() -> None:
    pool = PagedTokenToKVPoolAllocator(8, 4, 1)
    assert pool.alloc(9) is None and pool.available_size(0) == 8
    held = pool.alloc(7)
    assert held is not None
    assert pool.extend(7, int(held[-1]), 2) is None
    assert pool.extend(7, int(held[-1]), 1) is not None


def test_the_page_freed_last_is_handed_out_first() -> None:
    pool = TokenToKVPoolAllocator(4)
    held = pool.alloc(3)
    assert held is not None
    pool.free(held[1:2])
    again = pool.alloc(2)
    assert again is not None and again.tolist() == [1, 3]


def test_ranks_have_index_spaces_of_their_own() -> None:
    pool = TokenToKVPoolAllocator(4, dp_size=2)
    a, b = pool.alloc(4, 0), pool.alloc(4, 1)
    assert a is not None and b is not None and a.tolist() == b.tolist()
    pool.free(a, 0)
    assert (pool.available_size(0), pool.available_size(1)) == (4, 0)
    with pytest.raises(InvalidParamsError, match=r"dp_rank: 2 .* 2 rank"):
        pool.alloc(1, 2)


@pytest.mark.parametrize(
    ("indices", "names"),
    [
        ([0, 1, 2, 3, 0, 1, 2, 3], "page 0 .* named twice"),
        ([8, 9, 10, 11], "page 2 .* is free"),
        ([16, 17, 18, 19], "page 4 is outside"),
        ([1, 2, 3, 4], r"element 0 \(1\)"),
        ([0, 1, 3, 2], r"element 2 \(3\)"),
        ([0, 1, 2, 3, 5], r"element \d+"),
    ],
)
def test_bad_indices_are_named_and_change_nothing(indices: list[int], names: str) -> None:
    pool = PagedTokenToKVPoolAllocator(16, 4, 1)
    pool.alloc(8)
    with pytest.raises(InvalidIndexError, match=names):
        pool.free(np.array(indices, np.int32))
    assert pool.active_size(0) == 8 and pool.available_size(0) == 8


@pytest.mark.parametrize("indices", [[True] * 3, [[0, 1]], 1.0, ["a"], [0.5], [-1], [2**31]])
def test_what_is_no_index_array_is_refused(indices: object) -> None:
    pool = TokenToKVPoolAllocator(3)
    pool.alloc(3)
    with pytest.raises(InvalidIndexError):
        pool.free(np.asarray(indices))
    assert pool.active_size(0) == 3 and pool.free_pages(0).size == 0


def test_arguments_that_are_no_counts_are_named() -> None:
    pool = PagedTokenToKVPoolAllocator(8, 4, 1)
    for call in (
        lambda: pool.alloc(2.5),  # pyright: ignore[reportArgumentType]
        lambda: pool.alloc(1, 0.5),  # pyright: ignore[reportArgumentType]
        lambda: pool.alloc(-1),
        lambda: pool.alloc(1, True),
    ):
        with pytest.raises(InvalidParamsError, match=r"num_indices|dp_rank"):
            call()
    with pytest.raises(InvalidIndexError, match="last_index"):
        pool.extend(2, 10**6, 1)


def test_a_page_of_the_tree_cannot_be_freed_by_a_caller() -> None:
    pool = TokenToKVPoolAllocator(4)
    held = pool.alloc(2)
    assert held is not None
    pool.adopt(held, 0, protected=False)
    assert (pool.evictable_size(0), pool.active_size(0)) == (2, 0)
    with pytest.raises(InvalidIndexError, match=r"page 0 .* owned by the tree"):
        pool.free(held)
    pool.reclaim(held, 0)
    assert pool.available_size(0) == 4


@pytest.mark.parametrize("size", [(0, 1, 1), (4, 3, 1), (4, 0, 1), (4, 4, 0), (-4, 4, 1)])
def test_sizes_that_make_no_pool_are_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidParamsError, match="pool"):
        PagedTokenToKVPoolAllocator(*size)


def test_request_table_rows() -> None:
    table = ReqToTokenPool(2, 8)
    first, second = table.alloc(), table.alloc()
    assert (first, second, table.alloc(), table.num_free) == (0, 1, None, 0)
    table.write(1, 2, np.array([7, 8], np.int32))
    assert table.indices(1, 2, 4).tolist() == [7, 8]
    table.free(0)
    with pytest.raises(RequestError, match="row 0"):
        table.free(0)
    assert table.alloc() == 0
