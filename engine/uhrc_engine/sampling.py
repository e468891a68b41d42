"""Choosing the next token, on the device, reproducibly.

The random draw of a token depends on its request's seed and its position alone, so the same request
gives the same text whatever else is in the batch and however often it was retracted and resumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request chooses tokens. The default is greedy."""

    temperature: float = 0.0
    """0 = greedy (the other fields are then unused)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 = all."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 = all."""
    seed: int = 0
    """Any int in [0, 2**32)."""


def sample(
    logits: jax.Array, params: list[SamplingParams], positions: list[int]
) -> np.ndarray:
    """Next token ids int32[len(params)] from logits float32[R >= len(params), vocab].

    `positions[i]` is the absolute position the new token will have. Greedy ties go to the lowest id.
    Rows beyond len(params) are padding and are ignored.
    """
    raise NotImplementedError
