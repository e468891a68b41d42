"""A decoder whose layers keep either keys and values or a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uhrc_core.kinds import ComponentType
from uhrc_core.registry.recurrent import RecurrentBackendSpec, RecurrentModel
from uhrc_engine.models.contract import LayerCache
from uhrc_engine.models.decoder import Decoder, ModuleNames, Step
from uhrc_engine.models.errors import UnsupportedModelError
from uhrc_engine.models.rope import CosSin
from uhrc_full.layout import LayerShape

# What a family needs of the decoder, it may import from here.
__all__ = ["CosSin", "HybridDecoder", "ModuleNames", "Step", "read_recurrent"]


class HybridDecoder(Decoder):
    """A `Decoder` with recurrent layers, and attention in between."""

    def __init__(
        self,
        config: Mapping[str, Any],
        backend: RecurrentBackendSpec,
        recurrent: RecurrentModel,
        attention: LayerShape,
    ) -> None:
        """config: the language model's. recurrent: what `backend` read in it; the layers it does
        not name keep `attention`."""
        state = LayerCache(ComponentType.RECURRENT, backend.state_layout(recurrent.params))
        full = LayerCache(ComponentType.FULL, attention)
        linear = frozenset(recurrent.linear_layers)
        super().__init__(
            config, [state if i in linear else full for i in range(recurrent.num_layers)]
        )

    def is_recurrent(self, index: int) -> bool:
        """Whether layer `index` keeps a recurrent state."""
        return self.layer_caches[index].component is ComponentType.RECURRENT


def read_recurrent(config: Mapping[str, Any], *backends: RecurrentBackendSpec) -> RecurrentModel:
    """What the one of these backends that knows the model read in its config.

    Raises UnsupportedModelError when none does.
    """
    for backend in backends:
        if model := backend.matches_hf_config(config):
            return model
    raise UnsupportedModelError(
        f"model_type = {config.get('model_type')!r}, architectures = "
        f"{config.get('architectures')!r} has no recurrent layers of a kind this model class has; "
        f"it has: {', '.join(backend.name for backend in backends)}"
    )
