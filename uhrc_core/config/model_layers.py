"""From a Hugging Face ``config.json`` to what each layer caches, by asking the plugins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uhrc_core.config.config import Config
from uhrc_core.config.problems import Problems
from uhrc_core.errors import ConfigError
from uhrc_core.registry.catalog import PluginCatalog
from uhrc_core.registry.hf_config import full_attention_layer, num_layers_of, text_config
from uhrc_core.registry.plan import LayerKind
from uhrc_core.registry.registry import Registry


def read_model_layers(
    config: Config,
    hf_config: Mapping[str, Any] | None,
    catalog: PluginCatalog,
    problems: Problems,
) -> tuple[tuple[LayerKind, ...], Registry]:
    """The model's layers and the registry of all sound plugins, which were asked for them.

    No layers and an empty registry when no model is named; no layers and an entry in ``problems``
    when it cannot be read or no plugin knows it.
    """
    path = config.model.hf_config
    if hf_config is None and path is not None:
        hf_config = _read_json(path, problems)
    if hf_config is None:
        return (), Registry()
    registry, broken = catalog.load_each(catalog.names)
    try:
        layers = registry.layer_kinds(hf_config)
    except ConfigError as error:
        problems.add_lines(error.problems)
        return (), registry
    if layers is None and config.model.full_attention:
        layers = _all_full(text_config(hf_config), problems)
    elif not layers:
        asked = ", ".join(name for name in catalog.names if name not in broken) or "none"
        broken_note = f"; broken, so not asked: {', '.join(broken)}" if broken else ""
        problems.add(
            "model",
            f"no installed plugin knows model_type = {hf_config.get('model_type')!r}, "
            f"architectures = {hf_config.get('architectures')!r}; install the one that does, or if "
            f"all its layers are full attention set model.full_attention = true; asked: {asked}"
            f"{broken_note}",
        )
    return layers or (), registry


def _all_full(config: Mapping[str, Any], problems: Problems) -> tuple[LayerKind, ...]:
    """All layers full attention, as the operator says."""
    layer = full_attention_layer(config)
    if layer is None:
        problems.add("model.full_attention", "the sizes of the layers are not in the config")
        return ()
    return (layer,) * num_layers_of(config)


def _read_json(path: Path, problems: Problems) -> Mapping[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.add("model.hf_config", f"cannot be read as JSON: {error}", str(path))
        return None
    if not isinstance(content, dict):
        problems.add("model.hf_config", "holds no JSON object", str(path))
        return None
    return content  # pyright: ignore[reportUnknownVariableType]
