"""The hooks a plugin may implement. Hooks only declare: none does any work.

A plugin is a module named by an entry point of the group ``uhrc.plugins``. The entry point's name
is the name that a config uses for what the plugin brings: a component (``[components.full]``), an
eviction policy, a host tier, a top-level table of its own. A module that brings several is
registered under each name:

```toml
[project.entry-points."uhrc.plugins"]
hot_first = "my_package.plugin"
```

The module says which version of the hooks it is written for, imports nothing heavy (no jax, no
kernels), and implements any of the hooks below:

```python
from uhrc_core.plugin_api import EvictionPolicySpec, NoOptions, hookimpl
from my_package.policy import HotFirst

UHRC_API = (1, 0)


@hookimpl
def uhrc_eviction_policies():
    return [EvictionPolicySpec("hot_first", NoOptions, lambda options: HotFirst())]
```

Installed is not active. A config imports the plugins it names and no other, so a broken plugin
hurts only who names it; to find its commands ``uhrc`` imports them all, and to find out what a
model's layers are so does a config with ``model.hf_config``. ``uhrc plugins`` lists what is
installed and what is wrong with it. ``UHRC_PLUGINS=a,b`` limits all of this to the names given.

The records that hooks return, and all else that an author needs, are in `uhrc_core.plugin_api`.
"""

# pyright: reportReturnType=false
# (a hook spec is a signature and a docstring; pluggy never calls it)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from uhrc_core.combination import Rule
from uhrc_core.registry.plan import LayerKind
from uhrc_core.registry.recurrent import RecurrentBackendSpec
from uhrc_core.registry.specs import (
    CliCommandSpec,
    ComponentSpec,
    ConfigTableSpec,
    EvictionPolicySpec,
    HiCacheSpec,
)

#: Version of this file: the first number grows when a plugin must change, the second when a hook or
#: a field with a default is added. It is not the version of any package.
UHRC_API = (1, 0)

hookspec = pluggy.HookspecMarker("uhrc")
hookimpl = pluggy.HookimplMarker("uhrc")


@hookspec
def uhrc_component_specs() -> Sequence[ComponentSpec]:
    """Components, each configured by the table ``[components.<spec.name>]``.

    ``spec.params_model`` derives from `uhrc_core.plugin_api.ComponentParams`;
    ``spec.eviction_priority`` is that of its kind: FULL 2, SWA 1, RECURRENT 0; the component gets
    it from its context.
    """


@hookspec
def uhrc_recurrent_backends() -> Sequence[RecurrentBackendSpec]:
    """Kinds of linear-recurrent layers, each of which ``components.recurrent.backend`` can name.

    A model's backend is found by asking each ``spec.matches_hf_config``; its other layers are full
    attention.
    """


@hookspec
def uhrc_layer_kinds(hf_config: Mapping[str, Any]) -> Sequence[LayerKind] | None:
    """What each layer of the model with this Hugging Face ``config.json`` caches, in layer order.

    ``None`` for a model that is not of the plugin's family; ConfigError for one that is, and whose
    config holds an impossible value (`uhrc_core.plugin_api.size_of` raises it). Two plugins that
    both answer for one model are an error. Not asked when a recurrent backend knows the model.
    """


@hookspec
def uhrc_combination_rules() -> Sequence[Rule]:
    """Rules added to the combination matrix while the plugin is loaded.

    A feature is a setting as an operator writes it; a table's own are its ``features``.
    """


@hookspec
def uhrc_eviction_policies() -> Sequence[EvictionPolicySpec]:
    """Victim orders that ``cache.eviction_policy`` can name."""


@hookspec
def uhrc_hicache_hooks() -> Sequence[HiCacheSpec]:
    """Host tiers that ``hicache.name`` can name; the table's other keys are the tier's options.

    ``spec.params_model`` derives from `uhrc_core.plugin_api.HiCacheParams`. What a tier is asked
    and told, and when, is in `uhrc_core.plugin_api.HiCacheHooks`; `uhrc_core.testing` tests one.
    """


@hookspec
def uhrc_config_tables() -> Sequence[ConfigTableSpec]:
    """Top-level config tables of the plugin's own."""


@hookspec
def uhrc_cli_commands() -> Sequence[CliCommandSpec]:
    """Commands of ``uhrc``. Every installed plugin is asked; a broken one loses only its own."""
