"""The arguments that every command with a config file shares: FILE, ``--set``, the RFC's flags."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from uhrc_core.config.config import Config
from uhrc_core.config.loading import load_config
from uhrc_core.errors import ConfigError, PluginError

#: Flag, its type, and the key it sets.
FLAGS: tuple[tuple[str, type, str], ...] = (
    ("--enable-unified-radix-tree/--disable-unified-radix-tree", bool,
     "cache.enable_unified_radix_tree"),
    ("--disable-radix-cache", bool, "cache.disable_radix_cache"),
    ("--page-size", int, "cache.page_size"),
    ("--dp-size", int, "cache.dp_size"),
    ("--dp-schedule-policy", str, "scheduler.dp_schedule_policy"),
    ("--chunked-prefill-size", int, "scheduler.chunked_prefill_size"),
    ("--enable-recurrent-extra-buffer", bool, "components.recurrent.enable_extra_buffer"),
    ("--recurrent-track-interval", int, "components.recurrent.track_interval"),
)  # fmt: skip

_SET = "set_"
_FILE = "file"


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """Turn ``command(config, ...)`` into a typer command that takes FILE, ``--set`` and the flags.

    The command's first parameter receives the loaded `Config`; its others stay options of its own.
    Problems are printed one a line and the exit status is 1.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @wraps(command)
    def run(**arguments: Any) -> None:
        overrides = [
            f"{key}={_toml(value)}"
            for flag, _, key in FLAGS
            if (value := arguments.pop(_parameter(flag))) is not None
        ]
        overrides += arguments.pop(_SET) or []
        path: Path = arguments.pop(_FILE)
        try:
            command(_load(path, overrides), **arguments)
        except (ConfigError, PluginError) as error:
            fail(error)

    parameters = [_file_argument(), *own, _set_option(), *map(_flag_option, FLAGS)]
    keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(keyword)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {each.name: each.annotation for each in keyword}
    return run


def fail(error: ConfigError | PluginError) -> NoReturn:
    """Print what is wrong, one problem a line, and leave with status 1."""
    stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    problems = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
    for problem in problems:
        stderr.print(f"error: {problem}")
    raise typer.Exit(1) from error


def _load(path: Path, overrides: list[str]) -> Config:
    """The config; what is odd about it goes to stderr."""
    with warnings.catch_warnings(record=True) as found:
        config = load_config(path, overrides)
    stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for each in found:
        stderr.print(f"warning: {each.message}", style="yellow")
    return config


def _file_argument() -> inspect.Parameter:
    annotation = Annotated[Path, typer.Argument(help="The TOML config.", metavar="FILE")]
    return _keyword(_FILE, annotation, inspect.Parameter.empty)


def _set_option() -> inspect.Parameter:
    option = typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a key; repeatable.")
    return _keyword(_SET, Annotated[list[str] | None, option], None)


def _flag_option(flag: tuple[str, type, str]) -> inspect.Parameter:
    names, kind, key = flag
    option = typer.Option(names, help=f"Sets {key}.", show_default=False)
    return _keyword(_parameter(names), Annotated[kind | None, option], None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def _parameter(flag: str) -> str:
    return flag.split("/")[0].removeprefix("--").replace("-", "_")


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
