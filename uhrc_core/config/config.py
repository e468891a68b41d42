"""The configuration: its tables and their keys.

`uhrc_core.config.loading` makes them from a TOML file; `uhrc_core.config.resolve` settles what one
table implies for another. They can also be made in Python:
``Config(cache=CacheConfig(page_size=16), ...)``.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field, SerializeAsAny

from uhrc_core.registry.specs import ComponentParams, HiCacheParams
from uhrc_core.registry.tables import (
    CacheConfig,
    ConfigTable,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)

Table = TypeVar("Table", bound=ConfigTable)


class Config(ConfigTable):
    """A whole configuration. Every table has defaults.

    Attributes:
        components: ``[components.<name>]``, each of its plugin's ``params_model``.
        picked_by_model: ``components`` holds only what ``--set`` and flags say of them; which
            there are the model decides.
        hicache: ``[hicache]``, its plugin's ``params_model``; ``None``: no host tier.
        tables: top-level tables that plugins declare.
    """

    cache: CacheConfig = Field(default_factory=CacheConfig)
    components: dict[str, SerializeAsAny[ComponentParams]] = Field(default_factory=dict)
    picked_by_model: bool = False
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    hicache: SerializeAsAny[HiCacheParams] | None = None
    tables: dict[str, SerializeAsAny[ConfigTable]] = Field(default_factory=dict)

    def table(self, table_model: type[Table]) -> Table:
        """The plugin table of this model; one with its defaults if the file has none."""
        for table in self.tables.values():
            if isinstance(table, table_model):
                return table
        return table_model()
