"""What uhrc-mamba2 declares: the recurrent backend ``mamba2``. No jax."""

from __future__ import annotations

from uhrc_core.plugin_api import RecurrentBackendSpec, hookimpl
from uhrc_mamba2.backend import MAMBA2

UHRC_API = (1, 0)


@hookimpl
def uhrc_recurrent_backends() -> list[RecurrentBackendSpec]:
    return [MAMBA2]
