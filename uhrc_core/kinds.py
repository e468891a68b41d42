"""ComponentType: the kinds of data a node can carry, and what each is called elsewhere."""

from __future__ import annotations

from enum import IntEnum


class ComponentType(IntEnum):
    """Kinds of cached data; the value is the index of a node's slot, not an eviction priority."""

    FULL = 0
    SWA = 1
    RECURRENT = 2
