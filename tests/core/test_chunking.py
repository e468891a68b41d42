"""next_chunk_end: prefill is cut on a grid of absolute positions."""

from __future__ import annotations

import pytest

from uhrc_core.errors import InvalidParamsError
from uhrc_core.scheduling import next_chunk_end


def _ends(start: int, stop: int, size: int, boundaries: tuple[int, ...] = ()) -> list[int]:
    ends = []
    while start < stop:
        start = next_chunk_end(start, stop, size, boundaries)
        ends.append(start)
    return ends


def test_from_scratch_chunks_end_on_multiples_of_the_chunk_size() -> None:
    assert _ends(0, 700, 256) == [256, 512, 700]


def test_a_hit_joins_the_grid_of_the_run_from_scratch() -> None:
    assert _ends(256, 700, 256) == [512, 700]
    assert _ends(272, 700, 256) == [512, 700]
    assert _ends(511, 700, 256) == [512, 700]


@pytest.mark.parametrize("stop", [255, 256, 257, 511, 512, 513])
def test_every_start_gives_a_tail_of_the_same_grid(stop: int) -> None:
    whole = _ends(0, stop, 256)
    for start in range(stop):
        assert _ends(start, stop, 256) == [end for end in whole if end > start]


def test_boundaries_cut_beside_the_grid_and_those_outside_do_nothing() -> None:
    assert _ends(0, 700, 256, (300, 0, 999, 256, 301)) == [256, 300, 301, 512, 700]
    assert _ends(300, 700, 256, (300,)) == [512, 700]


@pytest.mark.parametrize(("start", "stop", "size"), [(5, 5, 4), (6, 5, 4), (-1, 5, 4), (0, 5, 0)])
def test_nothing_to_compute_and_empty_chunks_are_refused(start: int, stop: int, size: int) -> None:
    with pytest.raises(InvalidParamsError):
        next_chunk_end(start, stop, size)
