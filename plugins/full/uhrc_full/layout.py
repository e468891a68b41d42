"""How a paged KV cache lies in memory: pure data and arithmetic, no jax.

The caller thinks in *logical* shapes: a page of K or V is `(page_size, kv_heads, head_dim)`, a page
of MLA latents `(page_size, kv_lora_rank + qk_rope_head_dim)`. What is stored is a *physical* shape
chosen here per platform and seen by nobody outside this package: a TPU updates a pool in place only
when the last two dimensions fill its tiles, so there small heads share a row of 128 lanes. On CPU
and GPU both shapes are the same.

A token index t lives in page `t // page_size` at offset `t % page_size`. With `dp_size` ranks the
pool holds `dp_size * num_tokens` tokens; rank d's local index i is the global index
`d * num_tokens + i` (the caller adds the offset).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from uhrc_core.plugin_api import (
    FLOAT_DTYPES,
    TPU_LANES,
    BufferLayout,
    ConfigError,
    PoolLayout,
    size_problems,
    tpu_lanes,
    tpu_rows,
)


@dataclass(frozen=True, slots=True)
class GQAShape:
    """One layer's K and V for one token. MHA has kv_heads == heads, MQA kv_heads == 1."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class MLAShape:
    """One layer's latent for one token: the compressed KV, then the shared rotary key."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def latent_dim(self) -> int:
        """Width of the stored row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


LayerShape = GQAShape | MLAShape


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Physical place of one token's `heads x dim` values: `rows x lanes`, `heads_per_row` in a row.

    `rows * heads_per_row >= heads` and `lanes >= heads_per_row * dim`; the rest is zero padding.
    """

    heads: int
    dim: int
    rows: int
    lanes: int
    heads_per_row: int

    @classmethod
    def for_platform(cls, heads: int, dim: int, platform: str) -> RowLayout:
        """The layout that `platform` ("cpu", "gpu", "tpu") updates in place without padding copies.

        TPU: rows of whole 128-lane tiles (64 lanes were measured to copy), as many small heads in a
        row as fit, and as many rows as `tpu_rows` says.
        """
        if platform != "tpu":
            return cls(heads, dim, heads, dim, 1)
        heads_per_row = max(1, TPU_LANES // dim) if TPU_LANES % dim == 0 else 1
        rows = tpu_rows(-(-heads // heads_per_row))
        return cls(heads, dim, rows, tpu_lanes(heads_per_row * dim), heads_per_row)

    @property
    def shape(self) -> tuple[int, ...]:
        """Physical shape of one token."""
        return (self.rows, self.lanes)

    @property
    def is_identity(self) -> bool:
        """Whether logical and physical shapes are the same."""
        return (self.rows, self.lanes) == (self.heads, self.dim)

    def pack(self, logical: Any) -> Any:
        """[..., heads, dim] -> [..., rows, lanes] (numpy or jax array), zero-padded."""
        if self.is_identity:
            return logical
        xp, lead = logical.__array_namespace__(), logical.shape[:-2]
        slots = self.rows * self.heads_per_row
        full = xp.pad(logical, [(0, 0)] * len(lead) + [(0, slots - self.heads), (0, 0)])
        full = full.reshape(*lead, self.rows, self.heads_per_row * self.dim)
        spare = self.lanes - self.heads_per_row * self.dim
        return xp.pad(full, [(0, 0)] * (len(lead) + 1) + [(0, spare)])

    def unpack(self, physical: Any) -> Any:
        """[..., rows, lanes] -> [..., heads, dim]: the inverse of `pack`."""
        if self.is_identity:
            return physical
        lead = physical.shape[:-2]
        used = physical[..., : self.heads_per_row * self.dim]
        heads = used.reshape(*lead, self.rows * self.heads_per_row, self.dim)
        return heads[..., : self.heads, :]


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Physical place of one token's latent: `lanes >= dim` values, zero-padded, no head axis."""

    dim: int
    lanes: int

    @classmethod
    def for_platform(cls, dim: int, platform: str) -> LaneLayout:
        """TPU: whole 128-lane tiles. Elsewhere: as it is."""
        return cls(dim, tpu_lanes(dim) if platform == "tpu" else dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Physical shape of one token."""
        return (self.lanes,)

    def pack(self, logical: Any) -> Any:
        """[..., dim] -> [..., lanes] (numpy or jax array)."""
        if self.lanes == self.dim:
            return logical
        pad = [(0, 0)] * (logical.ndim - 1) + [(0, self.lanes - self.dim)]
        return logical.__array_namespace__().pad(logical, pad)

    def unpack(self, physical: Any) -> Any:
        """[..., lanes] -> [..., dim]."""
        return physical[..., : self.dim]


@dataclass(frozen=True, slots=True)
class KVBuffer(BufferLayout):
    """One array of the pool: "k", "v" or "latent" of a layer; (pages, page_size, *token.shape)."""

    token: RowLayout | LaneLayout


@dataclass(frozen=True, slots=True)
class KVLayout(PoolLayout[KVBuffer]):
    """Every array of a KV pool: (k, v) or (latent,) a layer; its units are tokens."""

    page_size: int
    shapes: tuple[LayerShape, ...]
    """Logical shape per layer."""

    @property
    def num_pages(self) -> int:
        """Over all dp ranks."""
        return self.num_units // self.page_size


def lay_out(
    shapes: Sequence[LayerShape],
    *,
    page_size: int,
    num_tokens: int,
    dp_size: int = 1,
    dtype: str = "float32",
    platform: str = "cpu",
) -> KVLayout:
    """Lays out a pool of `num_tokens` tokens per dp rank for layers of the given shapes.

    Raises ConfigError, listing every problem, when a size is not positive, `num_tokens` is not a
    multiple of `page_size`, or the dtype is not float32, bfloat16 or float16.
    """
    problems = size_problems({"page_size": page_size, "num_tokens": num_tokens, "dp_size": dp_size})
    if not problems and num_tokens % page_size:
        problems.append(f"num_tokens = {num_tokens} is not a multiple of page_size = {page_size}")
    if dtype not in FLOAT_DTYPES:
        problems.append(f"dtype = {dtype!r}: a KV pool is one of {', '.join(FLOAT_DTYPES)}")
    if problems:
        raise ConfigError(problems)
    num_pages = dp_size * num_tokens // page_size

    def buffer(layer: int, name: str, token: RowLayout | LaneLayout) -> KVBuffer:
        return KVBuffer(layer, name, (num_pages, page_size, *token.shape), dtype, token)

    def buffers(layer: int, shape: LayerShape) -> tuple[KVBuffer, ...]:
        match shape:
            case GQAShape(kv_heads, head_dim):
                row = RowLayout.for_platform(kv_heads, head_dim, platform)
                return (buffer(layer, "k", row), buffer(layer, "v", row))
            case MLAShape():
                lane = LaneLayout.for_platform(shape.latent_dim, platform)
                return (buffer(layer, "latent", lane),)

    layers = tuple(buffers(i, shape) for i, shape in enumerate(shapes))
    return KVLayout(layers, dp_size * num_tokens, dp_size, page_size, tuple(shapes))
