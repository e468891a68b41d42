"""Rotary position embedding and its scalings, as Hugging Face configs name them.

Sources: RoPE (Su et al. 2021), linear interpolation (Chen et al. 2023), YaRN (Peng et al. 2023,
sections 3.2 and 3.4), the Llama 3.1 frequency rule (Meta 2024, public reference code).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from uhrc_engine.models.errors import UnsupportedModelError

Frequencies = npt.NDArray[np.float32]
CosSin = tuple[jax.Array, jax.Array]
"""Cosine and sine of some positions' angles, as `Rope.cos_sin` gives them."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Angles per position: `position * inv_freq`; cos and sin are multiplied by `magnitude`."""

    inv_freq: Frequencies
    """float32[dim / 2]."""
    magnitude: float = 1.0
    score_scale: float = 1.0
    """What attention scores are multiplied by besides (DeepSeek's mscale_all_dim, squared)."""

    def cos_sin(self, positions: jax.Array) -> CosSin:
        """int32[...] -> cos, sin float32[..., 1, dim / 2] (the 1 is the head axis)."""
        angles = positions[..., None, None].astype(jnp.float32) * self.inv_freq
        return jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude


def rotate(x: jax.Array, cos_sin: CosSin) -> jax.Array:
    """Rotates x [..., heads, dim], whose pairs are (i, i + dim / 2), in float32.

    Where the angles are for fewer dimensions than a head has, its first ones are rotated, the
    others kept (partial rotary embedding).
    """
    cos, sin = cos_sin
    rotated = 2 * cos.shape[-1]
    a, b = jnp.split(x[..., :rotated].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., rotated:]], axis=-1)


def rope_from_config(config: Mapping[str, Any], dim: int) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before).

    dim: rotated dimensions of a head. Raises UnsupportedModelError for another scaling type.
    """
    settings = {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    kind = settings.get("rope_type", settings.get("type", "default"))
    # float32 throughout, as the published models were run with.
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    plain = np.float32(1) / np.float32(settings["rope_theta"]) ** exponents
    match kind:
        case "default":
            return Rope(plain)
        case "linear":
            return Rope(plain / np.float32(settings["factor"]))
        case "llama3":
            return Rope(_llama3(plain, settings))
        case "yarn":
            return _yarn(plain, settings, config)
        case _:
            raise UnsupportedModelError(
                f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )


def _llama3(plain: Frequencies, settings: Mapping[str, Any]) -> Frequencies:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = (settings[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = settings["original_max_position_embeddings"] * plain / (2 * np.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - keep) * plain / factor + keep * plain).astype(np.float32)


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """The temperature of YaRN's equation 22, with DeepSeek's multiplier."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(plain: Frequencies, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    """Blends stretched and kept frequencies over a ramp between two numbers of turns."""
    dim, original = 2 * len(plain), settings["original_max_position_embeddings"]
    factor = settings.get("factor") or config["max_position_embeddings"] / original

    def dimension_of(turns: float) -> float:
        return (
            dim
            * math.log(original / (turns * 2 * math.pi))
            / (2 * math.log(settings["rope_theta"]))
        )

    low = dimension_of(settings.get("beta_fast") or 32)
    high = dimension_of(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    stretch = np.clip(ramp, 0, 1)
    inv_freq = (plain / factor * stretch + plain * (1 - stretch)).astype(np.float32)

    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    magnitude = settings.get("attention_factor")
    if magnitude is None:
        magnitude = (
            _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, all_dim)
            if mscale and all_dim
            else _yarn_magnitude(factor)
        )
    score_scale = _yarn_magnitude(factor, all_dim) ** 2 if all_dim else 1.0
    return Rope(inv_freq, float(magnitude), score_scale)
