"""ComponentType: the kinds of data a node can carry, and what each is called elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from itertools import pairwise
from typing import Self


class ComponentType(IntEnum):
    """Kinds of cached data; the value is the index of a node's slot, not an eviction priority.

    Attributes:
        config_name: its table in a config, ``[components.<config_name>]``, unless a plugin brings
            the kind under another name.
        unit: what its pool counts.
        evict_field: the field of `EvictParams` that asks for those.
        eviction_priority: the RFC's number for internal nodes; a leaf's is 0 whatever the kind.
    """

    _value_: int
    config_name: str
    unit: str
    evict_field: str
    eviction_priority: int

    FULL = 0, "full", "tokens", "num_tokens", 2
    SWA = 1, "swa", "tokens", "swa_num_tokens", 1
    RECURRENT = 2, "recurrent", "slots", "recurrent_num", 0

    def __new__(
        cls, slot: int, config_name: str, unit: str, evict_field: str, eviction_priority: int
    ) -> Self:
        kind = int.__new__(cls, slot)
        kind._value_ = slot
        kind.config_name = config_name
        kind.unit = unit
        kind.evict_field = evict_field
        kind.eviction_priority = eviction_priority
        return kind

    @classmethod
    def of_table(cls, name: str) -> ComponentType | None:
        """The kind whose ``config_name`` this is, if it is one."""
        return next((kind for kind in cls if kind.config_name == name), None)


def eviction_order_mistake(
    priorities: Mapping[ComponentType, int], *, exact: bool = False
) -> str | None:
    """What breaks the internal order of the RFC, RECURRENT < SWA < FULL; ``None``: nothing does.

    Args:
        priorities: of the components present; each must be an integer ``>= 0``.
        exact: they must be the RFC's own numbers, as a plugin's must, whose component meets others
            that it does not know.
    """
    rfc = sorted(ComponentType, key=lambda kind: kind.eviction_priority)
    demanded = " < ".join(f"{kind.name} {kind.eviction_priority}" for kind in rfc)
    for kind, priority in priorities.items():
        if isinstance(priority, bool) or not isinstance(priority, int) or priority < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            return f"{kind.name} has eviction_priority {priority!r}: must be an integer >= 0"
        if exact and priority != kind.eviction_priority:
            return (
                f"{kind.name} has eviction_priority {priority}: must be {kind.eviction_priority} "
                f"({demanded})"
            )
    present = [kind for kind in rfc if kind in priorities]
    for lower, higher in pairwise(present):
        if priorities[lower] >= priorities[higher]:
            return (
                f"{lower.name} has eviction_priority {priorities[lower]} and {higher.name} "
                f"{priorities[higher]}: must be in the order {demanded}"
            )
    return None
