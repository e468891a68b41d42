"""Model families, found by the `architectures` or `model_type` of a Hugging Face config.

A distribution, this one among them, brings a family through the entry-point group `uhrc.models`:
the entry point's name is the architecture (or model_type), its value the `Model` subclass. Nothing
of it is imported before a config asks for it, so a family whose plugin is not installed costs the
others nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from uhrc_core.boundary import plugin_code
from uhrc_core.errors import PluginError
from uhrc_engine.models.contract import Model
from uhrc_engine.models.errors import UnsupportedModelError

ENTRY_POINT_GROUP = "uhrc.models"


def model_from_config(config: Mapping[str, Any]) -> Model:
    """The model a parsed config.json describes; the first known name of `architectures`, then
    `model_type`, decides.

    Raises UnsupportedModelError saying what was seen and what exists; PluginError when the class is
    of another distribution and does not import, or two distributions claim its name.
    """
    installed = entry_points(group=ENTRY_POINT_GROUP)
    seen = [*(config.get("architectures") or ()), config.get("model_type")]
    for name in seen:
        if name in installed.names:
            return _load(*installed.select(name=name)).from_hf_config(config)
    raise UnsupportedModelError(
        f"no model class for architectures = {config.get('architectures')!r}, "
        f"model_type = {config.get('model_type')!r}; there are: "
        f"{', '.join(sorted(installed.names))} "
        f"(entry-point group {ENTRY_POINT_GROUP!r})"
    )


def _load(point: EntryPoint, *others: EntryPoint) -> type[Model]:
    """The class behind the entry point that alone has its name."""
    owners = sorted(f"{p.dist.name if p.dist else '?'} ({p.value})" for p in (point, *others))
    what = f"model class {point.name!r}"
    if others:
        raise PluginError(f"{what} is claimed by {' and '.join(owners)}; uninstall one of them")
    with plugin_code(f"{what} of {owners[0]} does not import:"):
        return point.load()
