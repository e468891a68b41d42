"""Loading pretrained models: `load_pretrained(path)` for Hugging Face directories and GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from uhrc_engine.models.contract import Model, Params


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

    One tensor is held on the host at a time besides the params. Raises WeightsError kinds:
    CheckpointError, UnsupportedModelError, MissingTensorError, UnexpectedTensorError,
    TensorShapeError, each naming the file, key or tensor.
    """
    raise NotImplementedError
