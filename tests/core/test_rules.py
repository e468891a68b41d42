"""The combination matrix, over every subset of its features, against a second writing of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

import pytest
from pydantic import ValidationError

from uhrc_core.baseline import ChunkCache, RadixCache
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.combination import (
    COMPONENT_RULES,
    CORE_RULES,
    BrokenRulesError,
    Combination,
    Rule,
    broken_rules,
    check_components,
)
from uhrc_core.errors import InvalidParamsError
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedTokenToKVPoolAllocator
from uhrc_full.component import FullComponent

KINDS = {f"[components.{kind.config_name}]": kind for kind in ComponentType}
FULL, SWA, REC = KINDS
REUSE = "cache.disable_radix_cache = false"
UNIFIED = "cache.enable_unified_radix_tree = true"
PAGED = "cache.page_size > 1"
EXTRA = "components.recurrent.enable_extra_buffer = true"
TRACK = "components.recurrent.track_interval in whole pages"
BACKEND = "components.recurrent.backend"
DRAFTS, MIXED = "speculative_decoding", "mixed_chunked_prefill"
FEATURES = (FULL, SWA, REC, REUSE, UNIFIED, PAGED, EXTRA, TRACK, BACKEND, DRAFTS, MIXED)


def judge(*features: str) -> tuple[str, ...]:
    """`broken_rules` of features by name, those that are components or the backend included."""
    kinds = [kind for table, kind in KINDS.items() if table in features]
    settings = frozenset(features) - KINDS.keys() - {BACKEND}
    return broken_rules(kinds, settings, "kda" if BACKEND in features else None)


def subsets() -> Iterator[frozenset[str]]:
    sizes = (combinations(FEATURES, size) for size in range(len(FEATURES) + 1))
    return map(frozenset, chain.from_iterable(sizes))


def expected(has: frozenset[str]) -> set[str]:
    """The beginnings of the violations, written out by hand from the RFC's table."""
    wrong = expected_of_recurrent(has) | expected_of_extra_buffer(has)
    if FULL not in has:
        wrong.add(f"always, {FULL} is required")
    if SWA in has and REC in has:
        wrong.add(f"with {SWA}, {REC} is not possible")
    return wrong


def expected_of_recurrent(has: frozenset[str]) -> set[str]:
    wrong: set[str] = set()
    if REC in has and BACKEND not in has:
        wrong.add(f"with {REC}, {BACKEND} is required")
    if {REC, REUSE} <= has:
        if UNIFIED not in has:
            wrong.add(f"with {REC} + {REUSE}, {UNIFIED} is required")
        if PAGED in has and EXTRA not in has:
            wrong.add(f"with {REC} + {REUSE} + {PAGED}, {EXTRA} is required")
        if TRACK not in has:
            wrong.add(f"with {REC} + {REUSE}, {TRACK} is required")
    return wrong


def expected_of_extra_buffer(has: frozenset[str]) -> set[str]:
    wrong: set[str] = set()
    if EXTRA in has and REC not in has:
        wrong.add(f"with {EXTRA}, {REC} is required")
    if {EXTRA, REUSE} <= has:
        if PAGED not in has:
            wrong.add(f"with {REUSE} + {EXTRA}, {PAGED} is required")
        if DRAFTS in has:
            wrong.add(f"with {REUSE} + {EXTRA}, {DRAFTS} is not possible")
        if MIXED in has:
            wrong.add(f"with {REUSE} + {EXTRA}, {MIXED} is not possible")
    return wrong


def test_every_subset_reports_exactly_its_violations() -> None:
    count = 0
    for features in subsets():
        found = [line.split(":")[0] for line in judge(*features)]
        assert len(found) == len(set(found))
        assert set(found) == expected(features), sorted(features)
        count += 1
    assert count == 2 ** len(FEATURES)


@pytest.mark.parametrize(
    ("components", "allowed"),
    [
        ([FULL], True),
        ([FULL, SWA], True),
        ([FULL, REC, TRACK, BACKEND], True),
        ([FULL, SWA, REC, TRACK, BACKEND], False),
        ([], False),
        ([SWA], False),
        ([REC, TRACK, BACKEND], False),
    ],
)
def test_the_components_of_the_rfc(components: list[str], allowed: bool) -> None:
    assert (judge(REUSE, UNIFIED, *components) == ()) is allowed


@pytest.mark.parametrize("components", [[FULL], [FULL, SWA], [FULL, REC, BACKEND]])
@pytest.mark.parametrize("tree", [[], [UNIFIED]])
@pytest.mark.parametrize("pages", [[], [PAGED], [PAGED, EXTRA], [EXTRA]])
def test_without_reuse_every_combination_of_the_rfc_may_be_run(
    components: list[str], tree: list[str], pages: list[str]
) -> None:
    if EXTRA not in pages or REC in components:
        assert judge(*components, *tree, *pages) == ()


def test_every_rule_gives_its_reason_and_what_to_do() -> None:
    assert broken_rules(ComponentType, rules=COMPONENT_RULES) == (
        f"with {SWA}, {REC} is not possible: a tree has one auxiliary component: window data and "
        "recurrent snapshots cannot both decide where a hit ends; remove [components.swa] or "
        "[components.recurrent]",
    )
    assert all(len(each.because) > 40 and ";" in each.because for each in CORE_RULES)


def test_component_rules_speak_of_components_alone() -> None:
    assert len(COMPONENT_RULES) == 2
    for each in COMPONENT_RULES:
        assert each.features <= KINDS.keys()


def test_a_plugin_rule_is_judged_with_the_core_rules() -> None:
    extra = Rule(because="no pages; set cache.page_size = 1", when={"a toy"}, forbids={PAGED})
    found = broken_rules([ComponentType.SWA], {"a toy", PAGED}, rules=[*CORE_RULES, extra])
    assert [line.partition(":")[0] for line in found] == [
        f"always, {FULL} is required",
        f"with a toy, {PAGED} is not possible",
    ]
    assert found[1].endswith(": no pages; set cache.page_size = 1")


# -- as models -----------------------------------------------------------------------------------


def test_a_combination_exists_only_if_it_keeps_every_rule() -> None:
    sound = Combination(components=frozenset({ComponentType.FULL}), features=frozenset({PAGED}))
    assert sound.all_features == {FULL, PAGED}
    with pytest.raises(ValidationError) as caught:
        Combination(components=frozenset({ComponentType.SWA, ComponentType.RECURRENT}))
    (error,) = caught.value.errors()
    cause = error["ctx"]["error"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
    assert isinstance(cause, BrokenRulesError)
    assert [line.partition(":")[0] for line in cause.lines] == [
        f"always, {FULL} is required",
        f"with {SWA}, {REC} is not possible",
        f"with {REC}, {BACKEND} is required",
    ]


def test_the_rules_to_keep_can_be_given() -> None:
    values = {"components": frozenset({ComponentType.SWA})}
    assert Combination.model_validate(values, context=()).components == {ComponentType.SWA}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "requires nothing and forbids nothing"),
        ({"when": {"a"}}, "requires nothing and forbids nothing"),
        ({"requires": {"a"}, "forbids": {"a", "b"}}, "forbids a, which it needs"),
        ({"when": {"a"}, "forbids": {"a"}}, "forbids a, which it needs"),
        ({"requires": "a"}, "valid frozenset"),
        ({"requires": {7}}, "valid string"),
        ({"requires": {""}}, "at least 1 character"),
        ({"needs": {"a"}}, "Extra inputs are not permitted"),
    ],
)
def test_a_rule_that_says_nothing_or_contradicts_itself_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Rule(because="it is so", **fields)  # pyright: ignore[reportArgumentType]


# -- by hand -------------------------------------------------------------------------------------


def refusal(**priorities: int) -> str:
    with pytest.raises(InvalidParamsError) as caught:
        check_components({ComponentType[name]: value for name, value in priorities.items()})
    return str(caught.value)


def test_components_by_hand_are_judged_in_the_words_of_the_config() -> None:
    assert refusal(FULL=2, SWA=1, RECURRENT=0) == "\n".join(
        broken_rules(ComponentType, rules=COMPONENT_RULES)
    )


class OfAnotherKind(FullComponent):
    """A component of the kind that it is told to be."""

    def __init__(self, kind: ComponentType, eviction_priority: int) -> None:
        self.kind = kind
        super().__init__(PagedTokenToKVPoolAllocator(16, 4, 1), LRU(), eviction_priority)


def build(cache: type[BasePrefixCache], **priorities: int) -> BasePrefixCache:
    parts = [OfAnotherKind(ComponentType[kind], number) for kind, number in priorities.items()]
    return cache(parts, page_size=4, max_requests=1, max_context_len=16)


@pytest.mark.parametrize("cache", [UnifiedRadixCache, RadixCache, ChunkCache])
def test_no_cache_is_built_of_what_a_config_could_not_combine(cache: type[BasePrefixCache]) -> None:
    with pytest.raises(InvalidParamsError) as caught:
        build(cache, FULL=2, SWA=1, RECURRENT=0)
    (line,) = broken_rules(ComponentType, rules=COMPONENT_RULES)
    assert str(caught.value) == line
    for priorities in ({"FULL": -3}, {"FULL": 1, "SWA": 2}, {"FULL": 1, "RECURRENT": 1}):
        with pytest.raises(InvalidParamsError, match="eviction_priority"):
            build(cache, **priorities)
    assert build(cache, FULL=5).components[0].eviction_priority == 5


def test_the_internal_order_of_the_rfc_is_demanded() -> None:
    check_components({ComponentType.FULL: 0})
    check_components({ComponentType.FULL: 7, ComponentType.SWA: 3})
    order = "must be in the order RECURRENT 0 < SWA 1 < FULL 2"
    assert refusal(FULL=1, SWA=2) == (
        f"components: SWA has eviction_priority 2 and FULL 1: {order}"
    )
    assert refusal(FULL=1, RECURRENT=1).endswith(order)
    assert refusal(FULL=-3) == (
        "components: FULL has eviction_priority -3: must be an integer >= 0"
    )
    assert refusal(FULL=True).endswith("FULL has eviction_priority True: must be an integer >= 0")
