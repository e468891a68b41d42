"""What a recurrent backend declares: the shape of its state and the models it belongs to. No jax.

A backend is one kind of linear-recurrent layer. A plugin may bring new ones (Mamba-2, RWKV-7, ...):
the pool, the clone and the tree know a state only through its `StateLayout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from uhrc_core.specs import ConfigTable

#: Dtype of a buffer that is stored in whatever dtype the model runs in.
MODEL_DTYPE = "model"
ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


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
        return prod(self.shape) * ITEM_BYTES[dtype]


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
    num_layers: int


@dataclass(frozen=True, slots=True)
class RecurrentBackendSpec:
    """A recurrent backend as a plugin declares it.

    Attributes:
        name: what ``components.recurrent.backend`` says.
        params_model: pydantic model of the sizes of one layer; every field an int, so that
            ``params_model(**layer_kind.shape)`` is the inverse of ``params.model_dump()``.
        state_layout: the state of one layer with these params.
        matches_hf_config: reads a Hugging Face ``config.json``; ``None`` for a model that has no
            layer of this backend. ``model_type`` alone may not decide: look at what is there.
        kernels: name of each kernel and its implementations.
    """

    name: str
    params_model: type[ConfigTable]
    state_layout: Callable[[Any], StateLayout]
    matches_hf_config: Callable[[Mapping[str, Any]], RecurrentModel | None]
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def conv_buffers(kernel: int, **channels: int) -> tuple[BufferShape, ...]:
    """A conv buffer per name: ``conv_buffers(4, conv_q=64)``; none for a kernel of 1."""
    if kernel < 2:
        return ()
    return tuple(
        BufferShape(name, (kernel - 1, count), MODEL_DTYPE) for name, count in channels.items()
    )


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, which multimodal models nest."""
    return hf_config.get("text_config") or hf_config


def linear_layers_of(config: Mapping[str, Any], default: Callable[[int], bool]) -> tuple[int, ...]:
    """0-based ids of the linear layers: from ``layer_types``, else those ``default`` is true of."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(i for i in range(config["num_hidden_layers"]) if default(i))
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
