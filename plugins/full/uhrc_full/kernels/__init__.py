"""The device kernels of the FULL component, each in several implementations under one signature.

`reference` is the readable oracle, `xla` the fast form for CPU and GPU; `pallas_tpu` is the name
that a TPU form registers under. `auto` takes the best one registered for the platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_AUTO_ORDER = {"tpu": ("pallas_tpu", "xla")}


class Kernel:
    """The implementations of one kernel by name; they share the signature its module documents."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._implementations: dict[str, Callable[..., Any]] = {}

    def register(self, implementation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: adds an implementation. Raises ValueError when the name is taken."""
        if implementation in self._implementations:
            raise ValueError(f"kernel {self.name} already has an implementation {implementation!r}")

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self._implementations[implementation] = function
            return function

        return add

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names that can be asked for, in order of registration."""
        return tuple(self._implementations)

    def pick(self, implementation: str) -> Callable[..., Any]:
        """The function behind a name or behind "auto". Raises ValueError for an unknown name."""
        names = (
            _AUTO_ORDER.get(jax.default_backend(), ("xla",))
            if implementation == "auto"
            else (implementation,)
        )
        for name in names:
            if name in self._implementations:
                return self._implementations[name]
        raise ValueError(
            f"kernel {self.name} has no implementation {implementation!r}; "
            f"registered: {', '.join(self._implementations)}"
        )
