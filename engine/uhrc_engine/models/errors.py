"""What can be wrong with a checkpoint. Each message names the tensor, key or file concerned."""

from __future__ import annotations

from uhrc_core.errors import UHRCError


class WeightsError(UHRCError):
    """A model or its weights cannot be loaded."""


class UnsupportedModelError(WeightsError):
    """The checkpoint is of a model, or has a feature, that no installed model class serves."""


class MissingTensorError(WeightsError):
    """The model needs a tensor that the checkpoint lacks."""


class UnexpectedTensorError(WeightsError):
    """The checkpoint has tensors that the model does not know."""


class TensorShapeError(WeightsError):
    """A tensor has another shape than the config says."""


class CheckpointError(WeightsError):
    """The files are not a readable checkpoint (absent, truncated, no config)."""


class FetchError(WeightsError):
    """Weights could not be downloaded or failed their checksum."""


class TokenizerError(WeightsError):
    """The tokenizer or its chat template is absent or of a kind that cannot be rebuilt."""
