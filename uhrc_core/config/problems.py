"""Problems: what is wrong with a configuration, from its file to the combination matrix."""

from __future__ import annotations

import re
from collections.abc import Iterable

from uhrc_core.errors import ConfigError


class Problems:
    """Lines for the operator, in the order found, each with the config key that is to blame.

    One mistake gives one line: a check whose subject is blamed already (`blames`) says nothing.
    """

    def __init__(self) -> None:
        self._found: list[tuple[str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(line for _, line in self._found)

    def add(self, key: str, message: str, *value: object) -> None:
        """Note ``key: message``, or ``key = value: message``."""
        shown = "".join(f" = {each!r}" for each in value)
        self._found.append((key, f"{key}{shown}: {message}"))

    def add_lines(self, lines: Iterable[str]) -> None:
        """Note finished lines; the key to blame is what a line begins with, if it is one."""
        self._found += ((_key_of(line), line) for line in lines)

    def blames(self, key: str) -> bool:
        """Whether something is wrong with the key or, if it is a table, with what is in it."""
        return any(each == key or each.startswith(f"{key}.") for each, _ in self._found)

    def raise_any(self) -> None:
        """Raise ConfigError with all lines, if there are any."""
        if self:
            raise ConfigError(self.lines)


def _key_of(line: str) -> str:
    match = re.match(r"\w+(\.\w+)+(?=[:,]| = )", line)
    return match.group() if match else ""
