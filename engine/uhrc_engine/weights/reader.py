"""Reading a checkpoint exactly: every tensor once, of the expected shape, none left over."""

from __future__ import annotations

import re
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from uhrc_engine.models.contract import TensorReader
from uhrc_engine.models.errors import (
    MissingTensorError,
    TensorShapeError,
    UnexpectedTensorError,
)

_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors some checkpoints store although the config determines them."""
_SHOWN = 8
"""Names listed in a message before it says how many more there are."""


class TensorSource(Protocol):
    """A file format: what is stored, under HF names."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every stored tensor's shape, without reading its data."""
        ...

    def load(self, name: str) -> npt.NDArray[Any]:
        """One tensor's values in any float dtype; a fresh array."""
        ...


class CheckpointReader(TensorReader):
    """A `TensorReader` over a source that remembers what was taken."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._shapes = source.shapes()
        self._left = {name for name in self._shapes if not _DERIVED.search(name)}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def take(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """See `TensorReader.take`."""
        if name not in self._shapes:
            raise MissingTensorError(
                f"the checkpoint has no tensor {name!r} (expected shape {shape}); "
                "is config.json of the same model, and is every shard there?"
            )
        if self._shapes[name] != shape:
            raise TensorShapeError(
                f"tensor {name!r} has shape {self._shapes[name]}, the config says {shape}"
            )
        self._left.discard(name)
        return self._source.load(name).astype(np.float32, copy=False)

    def skip(self, name: str) -> None:
        """See `TensorReader.skip`."""
        self._left.discard(name)

    def skip_under(self, prefix: str) -> None:
        """See `TensorReader.skip_under`."""
        self._left = {name for name in self._left if not name.startswith(f"{prefix}.")}

    def finish(self) -> None:
        """Raises UnexpectedTensorError when stored tensors were not taken."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise UnexpectedTensorError(
                f"the checkpoint has tensors this model does not use: "
                f"{', '.join(names[:_SHOWN])}{more}"
            )
