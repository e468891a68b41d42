"""The combination matrix: which components and settings may be used together, and why not.

A configuration is described by a set of *features*, short names such as ``swa`` or ``paged``. A
`Rule` says what one set of features requires or forbids; `violations` is the whole judge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Every feature the core's rules speak of.
#: Components: the tree has them.
FULL, SWA, RECURRENT = "full", "swa", "recurrent"
#: ``cache.disable_radix_cache`` is off. Without reuse nothing is published, so that no rule about
#: what a tree can hold or match applies.
REUSE = "prefix_reuse"
#: ``cache.enable_unified_radix_tree``.
UNIFIED = "unified_tree"
#: ``cache.page_size > 1``.
PAGED = "paged"
#: Recurrent snapshots come from page-aligned track slots.
EXTRA_BUFFER = "extra_buffer"
#: The track interval is a positive multiple of the page size.
TRACK_ON_PAGES = "track_interval_on_pages"
#: Exactly one recurrent backend (KDA, GDN, GLA, ...) serves all recurrent layers.
ONE_BACKEND = "one_recurrent_backend"
#: What the engine around the cache does.
SPECULATIVE, MIXED_CHUNK = "speculative_decoding", "mixed_chunked_prefill"


@dataclass(frozen=True, slots=True)
class Rule:
    """Where all of ``when`` hold, all of ``requires`` must hold and none of ``forbids`` may.

    Attributes:
        because: the reason, as the end of a sentence; shown to the operator.
    """

    because: str
    when: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    forbids: frozenset[str] = frozenset()


def rule(because: str, when: str = "", requires: str = "", forbids: str = "") -> Rule:
    """A `Rule` from space-separated feature names."""
    return Rule(
        because,
        frozenset(when.split()),
        frozenset(requires.split()),
        frozenset(forbids.split()),
    )


#: The rules that speak of components alone.
COMPONENT_RULES: tuple[Rule, ...] = (
    rule(
        "a match walks FULL data, and the other components only narrow it; add [components.full]",
        requires=FULL,
    ),
    rule(
        "a tree has one auxiliary component: window data and recurrent snapshots cannot both "
        "decide where a hit ends; remove [components.swa] or [components.recurrent]",
        when=SWA,
        forbids=RECURRENT,
    ),
)

CORE_RULES: tuple[Rule, ...] = (
    *COMPONENT_RULES,
    rule(
        "the plain trees hold no recurrent state; set cache.enable_unified_radix_tree = true, or "
        "share nothing with cache.disable_radix_cache = true",
        when=f"{RECURRENT} {REUSE}",
        requires=UNIFIED,
    ),
    rule(
        "a recurrent state exists only at the end of a forward, so with pages it must be taken at "
        "page-aligned track points; set components.recurrent.enable_extra_buffer = true, or "
        "cache.page_size = 1",
        when=f"{RECURRENT} {PAGED} {REUSE}",
        requires=EXTRA_BUFFER,
    ),
    rule(
        "track slots publish whole pages, and with page_size 1 the running slot itself is "
        "published; set cache.page_size > 1, or remove enable_extra_buffer",
        when=f"{EXTRA_BUFFER} {REUSE}",
        requires=PAGED,
    ),
    rule(
        "only recurrent state is tracked in extra slots; add [components.recurrent]",
        when=EXTRA_BUFFER,
        requires=RECURRENT,
    ),
    rule(
        "a snapshot off the page grid could never be matched; set "
        "components.recurrent.track_interval to a positive multiple of cache.page_size",
        when=f"{RECURRENT} {REUSE}",
        requires=TRACK_ON_PAGES,
    ),
    rule(
        "all recurrent layers share one slot and one state layout, so KDA, GDN and GLA exclude "
        "each other; name exactly one in components.recurrent.backend",
        when=RECURRENT,
        requires=ONE_BACKEND,
    ),
    rule(
        "a rejected draft token cannot be taken out of a tracked state; turn one of them off",
        when=f"{EXTRA_BUFFER} {REUSE}",
        forbids=SPECULATIVE,
    ),
    rule(
        "a mixed step does not end every prefill row at its track point; turn one of them off",
        when=f"{EXTRA_BUFFER} {REUSE}",
        forbids=MIXED_CHUNK,
    ),
)


def violations(features: Iterable[str], rules: Iterable[Rule] = CORE_RULES) -> tuple[str, ...]:
    """Every broken rule, in the order of ``rules``, each as one line with its reason. Pure."""
    present = frozenset(features)
    return tuple(line for each in rules if each.when <= present for line in _broken(each, present))


def _broken(each: Rule, present: frozenset[str]) -> Iterable[str]:
    subject = f"with {_names(each.when)}" if each.when else "always"
    if missing := each.requires - present:
        yield f"{subject}, {_names(missing)} is required: {each.because}"
    if clash := each.forbids & present:
        yield f"{subject}, {_names(clash)} is not possible: {each.because}"


def _names(features: Iterable[str]) -> str:
    return " + ".join(sorted(features))
