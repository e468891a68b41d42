"""MXFP4 weights, made float32 as they are read (OCP Microscaling Formats v1.0, 2023).

32 numbers share one scale, a power of two. A number is E2M1: a sign, two bits of exponent (bias 1)
and one of mantissa, subnormal where the exponent is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from uhrc_engine.models.contract import TensorReader

BLOCK = 32
SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
"""The 16 numbers there are, by their bits."""


def take_mxfp4(
    tensors: TensorReader, name: str, shape: tuple[int, int, int]
) -> npt.NDArray[np.float32]:
    """float32[experts, into, out] of what is stored as `name`_blocks and `name`_scales.

    Those are uint8[experts, out, into / 32, 16], two numbers a byte, and uint8[experts, out,
    into / 32]. Raises as `TensorReader.take`.
    """
    experts, into, out = shape
    groups = (experts, out, into // BLOCK)
    blocks = tensors.take(f"{name}_blocks", (*groups, BLOCK // 2))
    scales = tensors.take(f"{name}_scales", groups)
    return dequantize(blocks, scales).swapaxes(1, 2)


def dequantize(blocks: npt.NDArray[Any], scales: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32[..., groups * 32] of whole numbers [..., groups, 16] and [..., groups], each of 8
    bits: the low half of a byte is the number that comes first."""
    bits = blocks.astype(np.uint8)
    numbers = np.stack([E2M1[bits & 15], E2M1[bits >> 4]], axis=-1).reshape(*scales.shape, BLOCK)
    exponents = scales.astype(np.int32) - SCALE_BIAS
    return np.ldexp(numbers, exponents[..., None]).reshape(*scales.shape[:-1], -1)
