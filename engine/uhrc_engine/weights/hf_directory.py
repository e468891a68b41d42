"""Hugging Face directories: config.json and safetensors files, single or sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from uhrc_engine.models.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return data


class SafetensorsSource:
    """The tensors of a directory's safetensors files; reads one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError when files are missing, truncated, or disagree with the index."""
        if (directory / INDEX_FILE).exists():
            wanted: dict[str, str] = read_json(directory / INDEX_FILE).get("weight_map", {})
            shards = sorted(set(wanted.values()))
        elif (directory / SINGLE_FILE).exists():
            wanted, shards = {}, [SINGLE_FILE]
        else:
            raise CheckpointError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        self._files: dict[str, Any] = {}
        for shard in shards:
            file = _open(directory / shard)
            self._files.update(dict.fromkeys(file.keys(), file))
        lost = sorted(set(wanted) - set(self._files))
        if lost:
            raise CheckpointError(f"{INDEX_FILE} lists {lost[0]!r}, which {wanted[lost[0]]} lacks")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `TensorSource`."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def load(self, name: str) -> npt.NDArray[Any]:
        """See `TensorSource`."""
        return self._files[name].get_tensor(name)


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="np")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
