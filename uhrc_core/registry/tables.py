"""The tables of a configuration: what all of them are, and the core's own.

The tables of components, host tiers and other plugins derive from `ConfigTable`, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

#: Largest pool or table this library addresses: indices are int32.
INDEX_MAX = 2**31 - 1


def _beside_config_file(path: Path, info: ValidationInfo) -> Path:
    base_dir: Path = info.context if isinstance(info.context, Path) else Path()
    return base_dir / path.expanduser()


#: A path in a table; a relative one starts at the directory of the config file.
ConfigPath = Annotated[Path, AfterValidator(_beside_config_file)]


class ConfigTable(BaseModel):
    """Base of every table: frozen, unknown keys refused, no conversion between types.

    Give each key a ``Field(description=...)``: the schema and the docs are made from it. A default
    that depends on another table belongs in `uhrc_core.config.resolve`, not in a validator.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


PositiveInt = Annotated[int, Field(ge=1, le=INDEX_MAX)]

DpSchedulePolicy = Literal["min_running_queue", "round_robin", "shape_aware", "cache_aware"]


class CacheConfig(ConfigTable):
    """The prefix cache as a whole."""

    enable_unified_radix_tree: bool = Field(
        default=False,
        description="Build the unified tree; off builds a plain one, of FULL or of FULL and SWA.",
    )
    disable_radix_cache: bool = Field(
        default=False, description="Share no prefix at all: every request computes its prompt."
    )
    page_size: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=1,
        description="Tokens per page. The production path of recurrent models needs >= 128.",
    )
    dp_size: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1, description="Data-parallel ranks, each with pools and prefixes of its own."
    )
    max_requests: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=64, description="Requests that may run at the same time."
    )
    max_context_len: Annotated[int, Field(ge=1, le=2**24)] = Field(
        default=8192, description="Tokens one request may hold, prompt and output."
    )
    eviction_policy: str = Field(
        default="lru",
        description="Victim order: lru, lfu, slru, fifo, priority, or one of a plugin.",
    )
    eviction_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the eviction policy."
    )


class SchedulerConfig(ConfigTable):
    """What the cache and the engine's scheduler agree on."""

    chunked_prefill_size: PositiveInt | None = Field(
        default=None,
        description="Most prompt tokens of one request in one step; unset: the engine chooses; "
        "the reference engine takes 256, in whole pages.",
    )
    dp_schedule_policy: DpSchedulePolicy = Field(
        default="min_running_queue", description="How a request is given its dp rank."
    )


class MemoryConfig(ConfigTable):
    """Memory that sizes the pools."""

    hbm_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = Field(
        default=None,
        description="Device memory for the pools of one dp rank; sizes the pool that names no "
        "size. Needs model.hf_config.",
    )


class ModelConfig(ConfigTable):
    """The model the cache serves."""

    hf_config: ConfigPath | None = Field(
        default=None,
        description="A Hugging Face config.json, relative to this file. Gives the layers, and the "
        "components where [components] names none.",
    )
    full_attention: bool = Field(
        default=False,
        description="Every layer is full attention, for a model whose type no plugin knows.",
    )


#: The core's own top-level tables whose keys do not depend on plugins.
CORE_TABLES: dict[str, type[ConfigTable]] = {
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "memory": MemoryConfig,
    "model": ModelConfig,
}

#: All top-level tables that no plugin can have for its own.
RESERVED_TABLES = (*CORE_TABLES, "components", "hicache")
