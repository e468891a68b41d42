"""What the API reference needs to read our docstrings: several names may share one description."""

from __future__ import annotations

import re
from typing import Any

import griffe

#: "start, stop: tokens of ..." in a list of arguments or attributes.
_SHARED = re.compile(r"^ +\w+(?:, \w+)+(?=: )", re.MULTILINE)
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


class SharedDescriptions(griffe.Extension):
    """Keeps such names together; the parser would take the second for the type of the first."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SHARED.sub(
                lambda found: found[0].replace(", ", f",{_NO_BREAK_SPACE}"), obj.docstring.value
            )
