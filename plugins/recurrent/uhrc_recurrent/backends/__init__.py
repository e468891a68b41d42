"""The recurrent backends this plugin brings, and the choice among backends for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from uhrc_core.errors import ConfigError
from uhrc_recurrent.backends.contract import (
    MODEL_DTYPE,
    BufferShape,
    RecurrentBackendSpec,
    RecurrentModel,
    StateLayout,
)
from uhrc_recurrent.backends.gdn import GDN, GDNParams
from uhrc_recurrent.backends.gla import GLA, GLAParams
from uhrc_recurrent.backends.kda import KDA, KDAParams

__all__ = [
    "BUILTIN_BACKENDS",
    "GDN",
    "GLA",
    "KDA",
    "MODEL_DTYPE",
    "BufferShape",
    "GDNParams",
    "GLAParams",
    "KDAParams",
    "RecurrentBackendSpec",
    "RecurrentModel",
    "StateLayout",
    "choose_backend",
]

BUILTIN_BACKENDS: tuple[RecurrentBackendSpec, ...] = (KDA, GDN, GLA)


def choose_backend(
    hf_config: Mapping[str, Any], specs: Sequence[RecurrentBackendSpec] = BUILTIN_BACKENDS
) -> tuple[RecurrentBackendSpec, RecurrentModel] | None:
    """The one backend that knows the model with this ``config.json``, and what it says of it.

    ``None`` when none does. Raises ConfigError when two do: backends are exclusive.
    """
    matches = [(spec, model) for spec in specs if (model := spec.matches_hf_config(hf_config))]
    if len(matches) > 1:
        raise ConfigError(
            f"the model (model_type = {hf_config.get('model_type')!r}) is claimed by the recurrent "
            f"backends {', '.join(spec.name for spec, _ in matches)}: exactly one may match; "
            "name one with components.recurrent.backend"
        )
    return matches[0] if matches else None
