"""The combination matrix, over every subset of its features, against a second writing of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations

import pytest

from uhrc_core.registry.rules import COMPONENT_RULES, CORE_RULES, rule, violations

FEATURES = (
    "full",
    "swa",
    "recurrent",
    "prefix_reuse",
    "unified_tree",
    "paged",
    "extra_buffer",
    "track_interval_on_pages",
    "one_recurrent_backend",
    "speculative_decoding",
    "mixed_chunked_prefill",
)


def subsets() -> Iterator[frozenset[str]]:
    sizes = (combinations(FEATURES, size) for size in range(len(FEATURES) + 1))
    return map(frozenset, chain.from_iterable(sizes))


def expected(has: frozenset[str]) -> set[str]:
    """The beginnings of the violations, written out by hand from the RFC's table."""
    wrong = expected_of_recurrent(has) | expected_of_extra_buffer(has)
    if "full" not in has:
        wrong.add("always, full is required")
    if "swa" in has and "recurrent" in has:
        wrong.add("with swa, recurrent is not possible")
    return wrong


def expected_of_recurrent(has: frozenset[str]) -> set[str]:
    wrong: set[str] = set()
    if "recurrent" in has and "one_recurrent_backend" not in has:
        wrong.add("with recurrent, one_recurrent_backend is required")
    if {"recurrent", "prefix_reuse"} <= has:
        if "unified_tree" not in has:
            wrong.add("with prefix_reuse + recurrent, unified_tree is required")
        if "paged" in has and "extra_buffer" not in has:
            wrong.add("with paged + prefix_reuse + recurrent, extra_buffer is required")
        if "track_interval_on_pages" not in has:
            wrong.add("with prefix_reuse + recurrent, track_interval_on_pages is required")
    return wrong


def expected_of_extra_buffer(has: frozenset[str]) -> set[str]:
    wrong: set[str] = set()
    if "extra_buffer" in has and "recurrent" not in has:
        wrong.add("with extra_buffer, recurrent is required")
    if {"extra_buffer", "prefix_reuse"} <= has:
        if "paged" not in has:
            wrong.add("with extra_buffer + prefix_reuse, paged is required")
        if "speculative_decoding" in has:
            wrong.add("with extra_buffer + prefix_reuse, speculative_decoding is not possible")
        if "mixed_chunked_prefill" in has:
            wrong.add("with extra_buffer + prefix_reuse, mixed_chunked_prefill is not possible")
    return wrong


def test_every_subset_reports_exactly_its_violations() -> None:
    count = 0
    for features in subsets():
        found = [line.split(":")[0] for line in violations(features)]
        assert len(found) == len(set(found))
        assert set(found) == expected(features), sorted(features)
        count += 1
    assert count == 2 ** len(FEATURES)


@pytest.mark.parametrize(
    ("components", "allowed"),
    [
        ("full", True),
        ("full swa", True),
        ("full recurrent track_interval_on_pages one_recurrent_backend", True),
        ("full swa recurrent track_interval_on_pages one_recurrent_backend", False),
        ("", False),
        ("swa", False),
        ("recurrent track_interval_on_pages one_recurrent_backend", False),
    ],
)
def test_the_components_of_the_rfc(components: str, allowed: bool) -> None:
    assert (violations(["prefix_reuse", "unified_tree", *components.split()]) == ()) is allowed


@pytest.mark.parametrize("components", ["full", "full swa", "full recurrent one_recurrent_backend"])
@pytest.mark.parametrize("tree", ["", "unified_tree"])
@pytest.mark.parametrize("pages", ["", "paged", "paged extra_buffer", "extra_buffer"])
def test_without_reuse_every_combination_of_the_rfc_may_be_run(
    components: str, tree: str, pages: str
) -> None:
    if "extra_buffer" not in pages or "recurrent" in components:
        assert violations(f"{components} {tree} {pages}".split()) == ()


def test_every_rule_gives_its_reason_and_what_to_do() -> None:
    assert violations(["full", "swa", "recurrent"], COMPONENT_RULES) == (
        "with swa, recurrent is not possible: a tree has one auxiliary component: window data and "
        "recurrent snapshots cannot both decide where a hit ends; remove [components.swa] or "
        "[components.recurrent]",
    )
    assert all(len(each.because) > 40 and ";" in each.because for each in CORE_RULES)


def test_component_rules_speak_of_components_alone() -> None:
    names = {"full", "swa", "recurrent"}
    for each in COMPONENT_RULES:
        assert each.when | each.requires | each.forbids <= names


def test_a_plugin_rule_is_judged_with_the_core_rules() -> None:
    extra = rule("the toy has no pages; set cache.page_size = 1", when="toy", forbids="paged")
    assert violations(["toy", "paged"], [*CORE_RULES, extra])[-1] == (
        "with toy, paged is not possible: the toy has no pages; set cache.page_size = 1"
    )
