"""Weights made from a seed: a model of any supported family from its config.json alone."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import numpy.typing as npt

from uhrc_engine.models.contract import TensorReader

_SPREAD = 0.5
"""Standard deviation of a projection's output for unit input, before the square root of its width
divides it: large enough that the most likely token is seldom a near tie."""


class SeededReader(TensorReader):
    """A checkpoint that has every tensor it is asked for, but no optional bias.

    A tensor depends on the seed and its name, not on the order of reading.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def take(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """See `TensorReader.take`. Norms are near 1, other vectors near 0; ``A_log`` and
        ``dt_bias`` as they are initialised for training (decays between 1 and 16 per unit of time);
        MXFP4 blocks are any bytes, and their scales make them as large as other weights."""
        rng = np.random.default_rng([self._seed, crc32(name.encode())])
        if name.endswith("A_log"):
            return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
        if name.endswith("dt_bias"):
            return rng.uniform(-4, -1, shape).astype(np.float32)
        if name.endswith("_blocks"):
            return rng.integers(0, 256, shape).astype(np.float32)
        if name.endswith("_scales"):
            return np.full(shape, _mxfp4_scale(32 * shape[-1]), np.float32)
        noise = rng.standard_normal(shape)
        if len(shape) == 1:
            return (1 + 0.1 * noise if "norm" in name else 0.1 * noise).astype(np.float32)
        if "embed" in name or "lm_head" in name:
            return noise.astype(np.float32)
        return (noise * 2 * _SPREAD / np.sqrt(shape[-1])).astype(np.float32)

    def skip(self, name: str) -> None:
        """Nothing is left over here."""

    def skip_under(self, prefix: str) -> None:
        """Nothing is left over here."""

    def __contains__(self, name: str) -> bool:
        return not name.endswith(".bias")


def _mxfp4_scale(width: int) -> int:
    """The byte that makes evenly drawn E2M1 numbers (standard deviation 2.9) weights of a width."""
    return round(127 + np.log2(2 * _SPREAD / np.sqrt(width) / 2.9))
