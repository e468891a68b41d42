"""The combination matrix: which components and settings may be used together, and why not.

A `Combination` is described by *features*, each a setting as an operator writes it, such as
``cache.page_size > 1``. A `Rule` says what one set of features requires or forbids. A combination
is validated against the rules when it is made, so that there is none that breaks one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from uhrc_core.errors import InvalidParamsError
from uhrc_core.kinds import ComponentType, eviction_order_mistake

#: Without reuse nothing is published, so that no rule about what a tree can hold or match applies.
REUSE = "cache.disable_radix_cache = false"
UNIFIED = "cache.enable_unified_radix_tree = true"
PAGED = "cache.page_size > 1"
#: Recurrent snapshots come from page-aligned track slots.
EXTRA_BUFFER = "components.recurrent.enable_extra_buffer = true"
#: A positive multiple of the page size.
TRACK_ON_PAGES = "components.recurrent.track_interval in whole pages"
#: Exactly one recurrent backend (KDA, GDN, GLA, ...) serves all recurrent layers.
ONE_BACKEND = "components.recurrent.backend"
#: What the engine around the cache does, as it says in ``resolve(engine_features=...)``.
SPECULATIVE, MIXED_CHUNK = "speculative_decoding", "mixed_chunked_prefill"


def table_of(kind: ComponentType) -> str:
    """The feature that the tree has a component of this kind: ``[components.swa]``."""
    return f"[components.{kind.config_name}]"


_FULL, _SWA, _RECURRENT = map(table_of, ComponentType)

Features = frozenset[Annotated[str, Field(min_length=1)]]


class Rule(BaseModel):
    """Where all of ``when`` hold, all of ``requires`` must hold and none of ``forbids`` may.

    Attributes:
        because: the reason and what to do, as the end of a sentence; shown to the operator.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always")

    because: Annotated[str, Field(min_length=1)]
    when: Features = frozenset()
    requires: Features = frozenset()
    forbids: Features = frozenset()

    @property
    def features(self) -> frozenset[str]:
        """All that the rule speaks of."""
        return self.when | self.requires | self.forbids

    @model_validator(mode="after")
    def _can_be_kept_and_broken(self) -> Self:
        if not self.requires | self.forbids:
            raise ValueError("requires nothing and forbids nothing, so it could never be broken")
        if clash := (self.when | self.requires) & self.forbids:
            raise ValueError(f"forbids {_names(clash)}, which it needs")
        return self


CORE_RULES: tuple[Rule, ...] = (
    Rule(
        because="a match walks FULL data, and the other components only narrow it; add "
        "[components.full]",
        requires=frozenset({_FULL}),
    ),
    Rule(
        because="a tree has one auxiliary component: window data and recurrent snapshots cannot "
        "both decide where a hit ends; remove [components.swa] or [components.recurrent]",
        when=frozenset({_SWA}),
        forbids=frozenset({_RECURRENT}),
    ),
    Rule(
        because="the plain trees hold no recurrent state; set cache.enable_unified_radix_tree = "
        "true, or share nothing with cache.disable_radix_cache = true",
        when=frozenset({_RECURRENT, REUSE}),
        requires=frozenset({UNIFIED}),
    ),
    Rule(
        because="a recurrent state exists only at the end of a forward, so with pages it must be "
        "taken at page-aligned track points; set components.recurrent.enable_extra_buffer = true, "
        "or cache.page_size = 1",
        when=frozenset({_RECURRENT, PAGED, REUSE}),
        requires=frozenset({EXTRA_BUFFER}),
    ),
    Rule(
        because="track slots publish whole pages, and with page_size 1 the running slot itself is "
        "published; set cache.page_size > 1, or remove enable_extra_buffer",
        when=frozenset({EXTRA_BUFFER, REUSE}),
        requires=frozenset({PAGED}),
    ),
    Rule(
        because="only recurrent state is tracked in extra slots; add [components.recurrent]",
        when=frozenset({EXTRA_BUFFER}),
        requires=frozenset({_RECURRENT}),
    ),
    Rule(
        because="a snapshot off the page grid could never be matched; set "
        "components.recurrent.track_interval to a positive multiple of cache.page_size",
        when=frozenset({_RECURRENT, REUSE}),
        requires=frozenset({TRACK_ON_PAGES}),
    ),
    Rule(
        because="all recurrent layers share one slot and one state layout, so KDA, GDN and GLA "
        "exclude each other; name exactly one in components.recurrent.backend",
        when=frozenset({_RECURRENT}),
        requires=frozenset({ONE_BACKEND}),
    ),
    Rule(
        because="a rejected draft token cannot be taken out of a tracked state; turn one of them "
        "off",
        when=frozenset({EXTRA_BUFFER, REUSE}),
        forbids=frozenset({SPECULATIVE}),
    ),
    Rule(
        because="a mixed step does not end every prefill row at its track point; turn one of them "
        "off",
        when=frozenset({EXTRA_BUFFER, REUSE}),
        forbids=frozenset({MIXED_CHUNK}),
    ),
)

#: The rules that speak of components alone, for whoever knows no more than those.
COMPONENT_RULES: tuple[Rule, ...] = tuple(
    rule for rule in CORE_RULES if rule.features <= {_FULL, _SWA, _RECURRENT}
)


class BrokenRulesError(ValueError):
    """The rules that a `Combination` breaks; in the ``ctx`` of its one validation error."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        self.lines = lines
        super().__init__("\n".join(lines))


class Combination(BaseModel):
    """Components and settings that may be used together.

    Validated against the rules that are given as the validation context, or `CORE_RULES`:
    ``Combination.model_validate({"components": kinds}, context=rules)``. The error lists every
    broken rule.

    Attributes:
        components: the kinds that the tree has.
        features: what the settings turn on.
        backend: the recurrent backend of all recurrent layers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    components: frozenset[ComponentType]
    features: Features = frozenset()
    backend: Annotated[str, Field(min_length=1)] | None = None

    @property
    def all_features(self) -> frozenset[str]:
        """``features``, and what components and the backend are as features."""
        backend = () if self.backend is None else (ONE_BACKEND,)
        return self.features.union(map(table_of, self.components), backend)

    @model_validator(mode="after")
    def _keeps_every_rule(self, info: ValidationInfo) -> Self:
        rules: Iterable[Rule] = CORE_RULES if info.context is None else info.context
        if broken := _violations(self.all_features, rules):
            raise BrokenRulesError(broken)
        return self


def broken_rules(
    components: Iterable[ComponentType],
    features: Iterable[str] = (),
    backend: str | None = None,
    rules: Iterable[Rule] = CORE_RULES,
) -> tuple[str, ...]:
    """What keeps these from being a `Combination`: a line a broken rule, in the order of ``rules``.

    Raises:
        ValidationError: something else is wrong with the arguments.
    """
    values = {
        "components": frozenset(components),
        "features": frozenset(features),
        "backend": backend,
    }
    try:
        Combination.model_validate(values, context=tuple(rules))
    except ValidationError as error:
        (first, *_) = error.errors()
        cause: Any = first.get("ctx", {}).get("error")
        if not isinstance(cause, BrokenRulesError):
            raise
        return cause.lines
    return ()


def check_components(priorities: Mapping[ComponentType, int]) -> None:
    """Refuse components, given with their eviction priorities, that no config could combine.

    Raises:
        InvalidParamsError: with every problem found, in the words of the config's errors.
    """
    problems = list(broken_rules(priorities, rules=COMPONENT_RULES))
    if mistake := eviction_order_mistake(priorities):
        problems.append(f"components: {mistake}")
    if problems:
        raise InvalidParamsError("\n".join(problems))


def _violations(present: frozenset[str], rules: Iterable[Rule]) -> tuple[str, ...]:
    """Every broken rule, as one line with its reason."""
    return tuple(line for rule in rules if rule.when <= present for line in _broken(rule, present))


def _broken(rule: Rule, present: frozenset[str]) -> Iterable[str]:
    subject = f"with {_names(rule.when)}" if rule.when else "always"
    if missing := rule.requires - present:
        yield f"{subject}, {_names(missing)} is required: {rule.because}"
    if clash := rule.forbids & present:
        yield f"{subject}, {_names(clash)} is not possible: {rule.because}"


def _names(features: Iterable[str]) -> str:
    return " + ".join(sorted(features))
