"""RecurrentBackendSpec: a kind of linear-recurrent layer, as a plugin declares it. No jax.

The tree, the pool and the clone know a state only through its `StateLayout`, so a plugin can bring
a kind that nobody here has heard of (Mamba-2, RWKV-7, ...) through the hook
`uhrc_recurrent_backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any

from pydantic import Field

from uhrc_core.boundary import call_factory
from uhrc_core.errors import ConfigError, PluginError
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.hf_config import LAYERS_MAX, full_attention_layer, text_config
from uhrc_core.registry.plan import LayerKind, item_bytes
from uhrc_core.registry.tables import ConfigTable, PositiveInt

#: Dtype of a buffer that is stored in whatever dtype the model runs in.
MODEL_DTYPE = "model"


@dataclass(frozen=True, slots=True)
class BufferShape:
    """One buffer of one layer's state of one sequence, as the kernels see it.

    Attributes:
        name: unique in the layer, e.g. ``temporal``, ``conv_q``.
        shape: logical; at least two axes. The first axis of a temporal buffer (of three axes or
            more), or the last of a conv buffer, is divided over the mesh axis "tensor".
        dtype: ``float32``, ``bfloat16``, ``float16`` or `MODEL_DTYPE`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def num_bytes(self, model_dtype: str) -> int:
        """Logical bytes, without the padding a device may add."""
        dtype = model_dtype if self.dtype == MODEL_DTYPE else self.dtype
        return prod(self.shape) * item_bytes(dtype)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The whole state one layer keeps of one sequence. A clone copies all of it.

    Attributes:
        temporal: the recurrent state, ``(heads, key_dim, value_dim)``.
        convs: the last ``kernel - 1`` inputs of each short convolution, ``(kernel - 1, channels)``,
            channels ordered by head; empty for a backend without convolution.
    """

    temporal: BufferShape
    convs: tuple[BufferShape, ...] = ()

    @property
    def buffers(self) -> tuple[BufferShape, ...]:
        return (self.temporal, *self.convs)

    def bytes_per_slot(self, model_dtype: str) -> int:
        """Logical bytes of this layer's part of a slot."""
        return sum(buffer.num_bytes(model_dtype) for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class RecurrentModel:
    """What a backend read in a model's ``config.json``.

    Attributes:
        params: sizes of a recurrent layer, an instance of the backend's ``params_model``; as a
            `LayerKind.shape`: ``params.model_dump()``.
        linear_layers: 0-based ids of the recurrent layers, ascending; the others are attention.
        num_layers: all decoder layers.
    """

    params: ConfigTable
    linear_layers: tuple[int, ...]
    num_layers: Annotated[int, Field(ge=1, le=LAYERS_MAX)]


@dataclass(frozen=True, slots=True)
class RecurrentBackendSpec:
    """A recurrent backend as a plugin declares it.

    Attributes:
        name: what ``components.recurrent.backend`` says; also the name of the plugin's entry point.
        params_model: pydantic model of the sizes of one layer; every field an int, so that
            ``params_model(**layer_kind.shape)`` is the inverse of ``params.model_dump()``.
        state_layout: the state of one layer with these params.
        matches_hf_config: reads a Hugging Face ``config.json``; ``None`` for a model that has no
            layer of this backend. ``model_type`` decides where every model of that type has such
            layers; where other backends share it (``bailing_hybrid``), look at what else is there.
        kernel_chunk: tokens the prefill kernel works on at a time, from the row's start: a prefill
            cut at its multiples gives the bits of the uncut one.
        kernels: name of each kernel and its implementations.
    """

    name: str
    params_model: type[ConfigTable]
    state_layout: Callable[[Any], StateLayout]
    matches_hf_config: Callable[[Mapping[str, Any]], RecurrentModel | None]
    kernel_chunk: PositiveInt = 1
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


def conv_buffers(kernel: int, **channels: int) -> tuple[BufferShape, ...]:
    """A conv buffer per name: ``conv_buffers(4, conv_q=64)``; none for a kernel of 1."""
    if kernel < 2:
        return ()
    return tuple(
        BufferShape(name, (kernel - 1, count), MODEL_DTYPE) for name, count in channels.items()
    )


def choose_backend(
    hf_config: Mapping[str, Any], specs: Sequence[RecurrentBackendSpec]
) -> tuple[RecurrentBackendSpec, RecurrentModel] | None:
    """The one backend that knows the model with this ``config.json``, and what it says of it.

    ``None`` when none does. Raises ConfigError when two do: backends are exclusive; PluginError
    when none does and one fails.
    """
    matches: list[tuple[RecurrentBackendSpec, RecurrentModel]] = []
    faults: list[PluginError] = []
    for spec in specs:
        key, ask = f"recurrent backend {spec.name!r}", spec.matches_hf_config
        try:
            model = call_factory(key, "matches_hf_config", RecurrentModel | None, ask, hf_config)
        except PluginError as error:
            faults.append(error)
        else:
            matches += [] if model is None else [(spec, model)]
    if len(matches) > 1:
        raise ConfigError(
            f"model: model_type = {hf_config.get('model_type')!r} is claimed by the recurrent "
            f"backends {', '.join(spec.name for spec, _ in matches)}, and exactly one may match; "
            "limit what is installed with UHRC_PLUGINS"
        )
    if not matches and faults:
        raise faults[0]
    return matches[0] if matches else None


def hybrid_layers(
    hf_config: Mapping[str, Any], specs: Sequence[RecurrentBackendSpec]
) -> tuple[LayerKind, ...] | None:
    """What each layer of a hybrid model caches: its backend's state, or full attention.

    ``None`` for a model that no backend knows. Raises ConfigError when two do, or when the sizes of
    its attention layers cannot be read.
    """
    chosen = choose_backend(hf_config, specs)
    if chosen is None:
        return None
    spec, model = chosen
    attention = full_attention_layer(text_config(hf_config))
    linear = frozenset(model.linear_layers)
    if attention is None and len(linear) < model.num_layers:
        raise ConfigError(
            f"model: {spec.name} knows model_type = {hf_config.get('model_type')!r}, but the sizes "
            "of its full-attention layers are not in the config"
        )
    recurrent = LayerKind(ComponentType.RECURRENT, model.params.model_dump(), spec.name)
    return tuple(
        recurrent if attention is None or i in linear else attention
        for i in range(model.num_layers)
    )
