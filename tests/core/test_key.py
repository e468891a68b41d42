"""RadixKey: what it accepts, and what makes two namespaces different."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_core.cache.key import RadixKey
from uhrc_core.errors import InvalidKeyError


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], np.uint16),
        jnp.array([1, 2, 3]),
    ],
)
def test_integer_sequences_become_the_same_key(tokens: list[int]) -> None:
    key = RadixKey(tokens)
    assert key == RadixKey([1, 2, 3]) and hash(key) == hash(RadixKey([1, 2, 3]))
    assert key.tokens.dtype == np.int32 and key.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "names"),
    [
        ([1, -1], "-1"),
        ([1, 2**31], "2147483648"),
        ([1.0, 2.0], "float64"),
        ([True, False], "bool"),
        ([[1, 2]], r"\[1, 2\]"),
        (["a"], "dtype"),
        ([1, None], "dtype object"),
        (3, r"shape \[\]"),
        ([2**70], "dtype|integers"),
    ],
)
def test_other_tokens_are_refused_by_name(tokens: list[int], names: str) -> None:
    with pytest.raises(InvalidKeyError, match=f"tokens.*({names})"):
        RadixKey(tokens)


@pytest.mark.parametrize(
    "extra_key",
    [1.5, ["lora"], b"x", (1, [2]), True, object(), 2**63, ((((((((((1,),),),),),),),),),)],
)
def test_extra_key_of_another_type_is_refused(extra_key: object) -> None:
    with pytest.raises(InvalidKeyError, match="extra_key"):
        RadixKey([1], extra_key)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dp_rank", [-1, 0.0, True, None, "0"])
def test_dp_rank_must_be_a_rank(dp_rank: int) -> None:
    with pytest.raises(InvalidKeyError, match="dp_rank"):
        RadixKey([1], dp_rank=dp_rank)


def test_namespaces_are_compared_part_by_part() -> None:
    spaces = [None, "", "abc", ("a", "bc"), ("ab", "c"), (("a",), "bc"), 0, "0", ("abc",)]
    assert len({RadixKey([1], space).namespace for space in spaces}) == len(spaces)
    assert RadixKey([1], "a", 0).namespace != RadixKey([1], "a", 1).namespace


def test_tokens_are_copied_and_read_only() -> None:
    source = np.array([1, 2, 3], np.int32)
    key = RadixKey(source)
    source[0] = 9
    assert key.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        key.tokens[0] = 9


@pytest.mark.parametrize(
    ("start", "edge", "limit", "common"),
    [
        (0, [1, 2, 3, 4], 6, 4),
        (0, [1, 2, 9, 4], 6, 2),
        (2, [3, 4], 6, 2),
        (2, [3, 4, 5, 6, 7, 8], 6, 4),
        (2, [3, 4, 5], 4, 2),
        (0, [9], 6, 0),
        (6, [1], 6, 0),
    ],
)
def test_common_len_counts_equal_tokens_up_to_the_limit(
    start: int, edge: list[int], limit: int, common: int
) -> None:
    assert RadixKey([1, 2, 3, 4, 5, 6]).common_len(RadixKey(edge), start, limit) == common


def test_slice_extended_and_page_floor() -> None:
    key = RadixKey([1, 2, 3], "s", 1)
    assert key.extended([4, 5]).slice(1, 5) == RadixKey([2, 3, 4, 5], "s", 1)
    assert RadixKey(range(35)).page_floor(16) == 32  # pyright: ignore[reportArgumentType]
