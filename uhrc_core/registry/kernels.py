"""Kernel: one device function in several implementations, under one signature.

By convention `reference` is the readable oracle, `xla` the fast form for CPU and GPU, and
`pallas_tpu` the name that a TPU form registers under. No jax here: a plugin says how to learn the
platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_AUTO_ORDER = {"tpu": ("pallas_tpu", "xla")}


class Kernel:
    """The implementations of one kernel by name; all have the signature its module documents.

    Args:
        name: for messages.
        platform: answers ``"cpu"``, ``"gpu"`` or ``"tpu"`` (`jax.default_backend`), for ``auto``.
    """

    def __init__(self, name: str, platform: Callable[[], str]) -> None:
        self.name = name
        self._platform = platform
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
        """The function behind a name or behind ``auto``. Raises ValueError for an unknown name."""
        names = (implementation,)
        if implementation == "auto":
            names = _AUTO_ORDER.get(self._platform(), ("xla",))
        for name in names:
            if name in self._implementations:
                return self._implementations[name]
        raise ValueError(
            f"kernel {self.name} has no implementation {implementation!r}; "
            f"registered: {', '.join(self._implementations)}"
        )
