"""The border to the code of plugins: what it raises is a `PluginError`, what it returns is checked.

Nothing of a plugin is called, compared or printed outside of `plugin_code`: even its ``__eq__`` and
its ``__repr__`` may be broken, and that may cost nobody but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from types import GenericAlias
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from uhrc_core.errors import PluginError, UHRCError

_REPORT = "; report this to the plugin's author"
_STRICT = ConfigDict(
    strict=True, arbitrary_types_allowed=True, revalidate_instances="always", defer_build=True
)


@contextmanager
def plugin_code(
    what: str, advice: str = _REPORT, passes: tuple[type[BaseException], ...] = ()
) -> Generator[None, None, None]:
    """Whatever is raised inside, ``SystemExit`` included, becomes a one-line `PluginError`.

    Args:
        what: the start of the message, which names the plugin and ends with a verb.
        passes: what is let through as it is; ``KeyboardInterrupt`` always.
    """
    try:
        yield
    except (KeyboardInterrupt, *passes):
        raise
    except BaseException as error:
        raise PluginError(f"{what} {_one_line(error)}{advice}") from error


def call_factory(
    key: str, factory: str, returns: Any, function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """What a plugin's factory makes, checked to be a ``returns``.

    Args:
        key: what configures it, for messages: ``components.full``.

    Raises:
        PluginError: it raised something unexpected, or returned something else.
    """
    with plugin_code(f"{key}: {factory} raised", passes=(UHRCError,)):
        made = function(*args, **options)
        mistake = mistake_in(made, returns)
    if mistake:
        raise PluginError(f"{key}: {factory} returned {mistake}{_REPORT}")
    return made


def mistake_in(value: object, kind: Any) -> str | None:
    """What keeps ``value`` from being a ``kind``, down to the fields of records; ``None``: it is.

    Strict: a list is no tuple, a bool no int. Call it inside `plugin_code`.
    """
    try:
        _adapter(kind).validate_python((value,))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        message = first["msg"][0].lower() + first["msg"][1:]
        return f"{where}{' = ' if where else ''}{first['input']!r}: {message}"
    return None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # In a tuple, because pydantic takes no config for a dataclass itself.
    one_of_it: Any = GenericAlias(tuple, (kind,))
    return TypeAdapter[Any](one_of_it, config=_STRICT)


def _one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}"
