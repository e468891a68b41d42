"""How the API reference reads our docstrings, where they differ from what its parser knows.

Several names may share one description, and what a function returns is said in prose.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import griffe

#: "start, stop: tokens of ..." in a list of arguments or attributes. The parser takes what follows
#: a space for the type of the first.
_SHARED = re.compile(r"^ +\w+(?:, \w+)+(?=: )", re.MULTILINE)
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
#: The parser takes what stands before a colon for a type.
_RETURNS = re.compile(r"^Returns:\n((?: {4}.*(?:\n|$))+)", re.MULTILINE)


class HouseStyle(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_the_parser_reads(obj.docstring.value)


def as_the_parser_reads(docstring: str) -> str:
    """The same docstring with shared names held together and what is returned as a paragraph."""
    docstring = _SHARED.sub(lambda names: names[0].replace(", ", f",{_NO_BREAK_SPACE}"), docstring)
    return _RETURNS.sub(lambda said: f"**Returns:**\n\n{dedent(said[1])}", docstring)
