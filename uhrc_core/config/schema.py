"""The config as JSON Schema, with the tables of the given plugins."""

from __future__ import annotations

from typing import Any, Literal, Union

from pydantic import Field, create_model

from uhrc_core.registry.registry import Registry
from uhrc_core.registry.tables import CORE_TABLES, ConfigTable


def config_schema(registry: Registry) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a config file."""
    components = create_model(
        "ComponentTables",
        __base__=ConfigTable,
        __doc__="What the tree caches, one table a component.",
        **_optional({name: spec.params_model for name, spec in registry.components.items()}),
    )
    tables: dict[str, Any] = {name: spec.table_model for name, spec in registry.tables.items()}
    if registry.host_tiers:
        tables |= {"hicache": _hicache_table(registry)}
    model = create_model(
        "UHRCConfig",
        __base__=ConfigTable,
        __doc__="Configuration of a Unified Hybrid Radix Cache.",
        **_optional({**CORE_TABLES, "components": components, **tables}),
    )
    schema = model.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _hicache_table(registry: Registry) -> Any:
    """The table as each tier wants it, told apart by its name."""
    models: list[Any] = []
    for spec in registry.host_tiers.values():
        model = spec.params_model
        name: Any = (Literal[spec.name], model.model_fields["name"])
        models.append(
            create_model(model.__name__, __base__=model, __doc__=model.__doc__, name=name)
        )
    return models[0] if len(models) == 1 else Union[tuple(models)]  # noqa: UP007


def _optional(tables: dict[str, Any]) -> dict[str, Any]:
    """Fields for tables that may be left out; the default is not part of the schema.

    A table may have any name, a field may not: so the name is the field's alias.
    """
    return {
        f"table_{index}": (model, Field(default_factory=dict, alias=name))
        for index, (name, model) in enumerate(tables.items())
    }
