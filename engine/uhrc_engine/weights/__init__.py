"""`load_pretrained(path)`: models from Hugging Face directories and GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from uhrc_engine.config import EngineTable
from uhrc_engine.models import model_from_config
from uhrc_engine.models.contract import Model, Params
from uhrc_engine.models.errors import CheckpointError
from uhrc_engine.weights.gguf_file import open_gguf
from uhrc_engine.weights.hf_directory import SafetensorsSource, read_json
from uhrc_engine.weights.reader import CheckpointReader, TensorSource
from uhrc_engine.weights.seeded import SeededReader


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model ready for the Runner."""

    model: Model
    params: Params
    config: dict[str, Any]
    """The HF config (rebuilt from the metadata for GGUF)."""
    path: Path


def load_pretrained(path: str | Path, dtype: Any = jnp.float32) -> Pretrained:
    """Loads an HF directory (config.json + *.safetensors, single or sharded) or a GGUF file.

    Besides the params, the host holds the tensors of one fused projection at a time. Raises
    WeightsError kinds: CheckpointError, UnsupportedModelError, MissingTensorError,
    UnexpectedTensorError, TensorShapeError, each naming the file, key or tensor.
    """
    path = Path(path)
    config, source = _open_checkpoint(path)
    model = _model(path, config)
    reader = CheckpointReader(source)
    params = model.load_params(reader, dtype)
    reader.finish()
    return Pretrained(model, params, config, path)


def load_seeded(path: str | Path, seed: int, dtype: Any = jnp.float32) -> Pretrained:
    """The model of an HF directory's config.json with weights made from a seed.

    Raises CheckpointError, UnsupportedModelError as `load_pretrained`.
    """
    path = Path(path)
    config = read_json(path / "config.json")
    model = _model(path, config)
    return Pretrained(model, model.load_params(SeededReader(seed), dtype), config, path)


def load_model(path: str | Path, table: EngineTable) -> Pretrained:
    """The model of ``[engine]``, whose files are at ``path``."""
    if table.random_weights_seed is not None:
        return load_seeded(path, table.random_weights_seed, table.dtype)
    return load_pretrained(path, table.dtype)


def _model(path: Path, config: dict[str, Any]) -> Model:
    try:
        return model_from_config(config)
    except KeyError as error:
        raise CheckpointError(f"{path}: the config lacks {error.args[0]!r}") from error


def _open_checkpoint(path: Path) -> tuple[dict[str, Any], TensorSource]:
    if path.is_dir():
        return read_json(path / "config.json"), SafetensorsSource(path)
    if path.suffix == ".gguf":
        file = open_gguf(path)
        return file.hf_config(), file
    raise CheckpointError(f"{path} is neither a directory nor a .gguf file")
