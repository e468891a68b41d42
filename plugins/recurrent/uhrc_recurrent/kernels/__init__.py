"""The device kernels of the RECURRENT component, each in several implementations, one signature.

`reference` is the readable oracle, `xla` the fast form for CPU and GPU; `pallas_tpu` is the name a
TPU form registers under. `auto` takes the best one registered for the platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_AUTO_ORDER = {"tpu": ("pallas_tpu", "xla"), "cpu": ("xla",), "gpu": ("xla",)}


class Kernel:
    """The implementations of one kernel by name; all have the signature its module documents."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._implementations: dict[str, Callable[..., Any]] = {}

    def register(self, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: adds an implementation. Raises ValueError when a name is taken."""
        if taken := set(names) & set(self._implementations):
            raise ValueError(f"kernel {self.name} already has {', '.join(sorted(taken))}")

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self._implementations |= dict.fromkeys(names, function)
            return function

        return add

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names that can be asked for, in order of registration."""
        return tuple(self._implementations)

    def pick(self, implementation: str) -> Callable[..., Any]:
        """The function behind a name or behind "auto". Raises ValueError for an unknown name."""
        names = (
            _AUTO_ORDER[jax.default_backend()] if implementation == "auto" else (implementation,)
        )
        for name in names:
            if name in self._implementations:
                return self._implementations[name]
        raise ValueError(
            f"kernel {self.name} has no implementation {implementation!r}; "
            f"registered: {', '.join(self._implementations)}"
        )
