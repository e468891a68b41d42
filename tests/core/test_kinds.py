"""What a kind of component is called, and whole pages."""

from __future__ import annotations

import pickle

import pytest

from uhrc_core.cache.params import EvictParams
from uhrc_core.indices import page_ceil, page_floor
from uhrc_core.kinds import ComponentType

FULL, SWA, RECURRENT = ComponentType


def test_a_kind_is_the_index_of_its_slot_and_carries_its_names() -> None:
    assert [*ComponentType] == [0, 1, 2]
    assert [kind.config_name for kind in ComponentType] == ["full", "swa", "recurrent"]
    assert [kind.unit for kind in ComponentType] == ["tokens", "tokens", "slots"]
    assert [kind.eviction_priority for kind in ComponentType] == [2, 1, 0]
    assert ComponentType(1) is SWA and pickle.loads(pickle.dumps(RECURRENT)) is RECURRENT


def test_a_kind_is_found_by_its_table() -> None:
    assert [ComponentType.of_table(kind.config_name) for kind in ComponentType] == [0, 1, 2]
    assert ComponentType.of_table("FULL") is None


@pytest.mark.parametrize("kind", ComponentType)
def test_an_eviction_asks_for_a_kind_by_its_field(kind: ComponentType) -> None:
    params = EvictParams.model_validate({kind.evict_field: 7})
    amounts = {each: params.amount(each) for each in ComponentType}
    assert amounts == {FULL: 0, SWA: 0, RECURRENT: 0} | {kind: 7}


@pytest.mark.parametrize(
    ("num_tokens", "floor", "ceil"),
    [(0, 0, 0), (1, 0, 16), (15, 0, 16), (16, 16, 16), (17, 16, 32)],
)
def test_whole_pages(num_tokens: int, floor: int, ceil: int) -> None:
    assert (page_floor(num_tokens, 16), page_ceil(num_tokens, 16)) == (floor, ceil)
    assert page_floor(num_tokens, 1) == page_ceil(num_tokens, 1) == num_tokens
