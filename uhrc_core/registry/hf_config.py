"""What a Hugging Face ``config.json`` says of its layers, in the usual fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from uhrc_core.errors import ConfigError
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.plan import LayerKind
from uhrc_core.registry.tables import INDEX_MAX

#: More layers than any model has; each is a record and some buffers of its own.
LAYERS_MAX = 4096


#: Families that leave their pattern to the code: every n-th layer is full.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}
#: Families without windows where ``use_sliding_window`` is not there.
_WINDOWS_ON_REQUEST = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
#: What the families with ``use_sliding_window`` take where a config does not say it.
_MAX_WINDOW_LAYERS = 28


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, which multimodal models nest."""
    nested = hf_config.get("text_config")
    return cast("Mapping[str, Any]", nested) if isinstance(nested, dict) else hf_config


def full_attention_layer(config: Mapping[str, Any]) -> LayerKind | None:
    """What one full-attention layer caches; ``None`` when its sizes are not all there.

    ``shape`` has ``num_heads``, ``num_kv_heads`` and ``head_dim``, or for MLA ``kv_lora_rank`` and
    ``qk_rope_head_dim``. Raises ConfigError for a size that is there and is none.
    """
    shape = _mla_shape(config) if size_of(config, "kv_lora_rank", 0) else _gqa_shape(config)
    return LayerKind(ComponentType.FULL, shape) if all(shape.values()) else None


def linear_layers_of(
    config: Mapping[str, Any], num_layers: int, default: Callable[[int], bool]
) -> tuple[int, ...]:
    """0-based ids of the linear layers: from ``layer_types``, else those ``default`` is true of."""
    kinds = layer_types_of(config)
    if kinds is None:
        return tuple(i for i in range(num_layers) if default(i))
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")


def window_layers_of(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """0-based ids of the sliding-window layers, in any of the ways configs say it.

    From ``layer_types`` if it is there; else all but every ``sliding_window_pattern``-th (Gemma 3,
    Cohere 2); else those from ``max_window_layers`` on (Qwen 2); else all (Mistral).
    """
    family = str(config.get("model_type"))
    uses_windows = config.get("use_sliding_window", family not in _WINDOWS_ON_REQUEST)
    if not config.get("sliding_window") or not uses_windows:
        return ()
    kinds = layer_types_of(config)
    if kinds is not None:
        return tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    pattern = size_of(config, "sliding_window_pattern", 0) or _WINDOW_PATTERNS.get(family, 0)
    if pattern:
        return tuple(i for i in range(num_layers) if (i + 1) % pattern)
    first = 0
    if "use_sliding_window" in config and config.get("max_window_layers") != 0:
        first = size_of(config, "max_window_layers", _MAX_WINDOW_LAYERS)
    return tuple(range(first, num_layers))


def layer_types_of(config: Mapping[str, Any]) -> Sequence[str] | None:
    """``layer_types``, a name for each layer. Raises ConfigError when it is no list of names."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"model.hf_config: layer_types = {kinds!r}: must be a list of names")
    return cast("Sequence[str]", kinds)


def num_layers_of(config: Mapping[str, Any], default: int | None = None) -> int:
    """``num_hidden_layers``, as `size_of`."""
    return size_of(config, "num_hidden_layers", default, largest=LAYERS_MAX)


def size_of(
    config: Mapping[str, Any], key: str, default: int | None = None, *, largest: int = INDEX_MAX
) -> int:
    """A positive number of the config, or ``default`` where it is absent or null.

    Raises ConfigError for another value, and where it is absent and has no default: a size that is
    passed over makes another model.
    """
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise ConfigError(
            f"model.hf_config: {key} = {value!r}: must be an integer from 1 to {largest}"
        )
    return value


def _mla_shape(config: Mapping[str, Any]) -> dict[str, int]:
    return {key: size_of(config, key, 0) for key in ("kv_lora_rank", "qk_rope_head_dim")}


def _gqa_shape(config: Mapping[str, Any]) -> dict[str, int]:
    num_heads = size_of(config, "num_attention_heads", 0)
    return {
        "num_heads": num_heads,
        "num_kv_heads": size_of(config, "num_key_value_heads", num_heads),
        "head_dim": size_of(config, "head_dim", 0) or _share_of_head(config, num_heads),
    }


def _share_of_head(config: Mapping[str, Any], num_heads: int) -> int:
    hidden_size = size_of(config, "hidden_size", 0)
    if 0 < hidden_size < num_heads:
        raise ConfigError(
            f"model.hf_config: hidden_size = {hidden_size}: less than num_attention_heads = "
            f"{num_heads}"
        )
    return hidden_size // max(num_heads, 1)
