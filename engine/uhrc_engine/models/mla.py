"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), absorbed, over the paged pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_core.kinds import ComponentType
from uhrc_engine.models import blocks
from uhrc_engine.models.contract import Params, StepInputs, TensorReader
from uhrc_engine.models.rope import CosSin, rotate
from uhrc_full.kernels.mla import mla_attention
from uhrc_full.layout import MLAShape

LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MLA:
    """One layer's numbers, in elements; `q_rank` None = one query projection."""

    hidden: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    scale: float
    """What scores are multiplied by."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], score_scale: float = 1.0) -> MLA:
        """A layer under the usual names. score_scale: `Rope.score_scale`, where it rotates."""
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        return cls(
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            q_rank=config.get("q_lora_rank"),
            kv_rank=config["kv_lora_rank"],
            nope=nope,
            rope=rope,
            value=config["v_head_dim"],
            scale=(nope + rope) ** -0.5 * score_scale,
        )

    @property
    def cache_shape(self) -> MLAShape:
        """What the layer keeps of a token."""
        return MLAShape(self.kv_rank, self.rope)

    def take(self, tensors: TensorReader, prefix: str, dtype: Any) -> Params:
        """The layer's weights under `prefix`; kv_b_proj is cut into key and value halves per head.

        The rotary rows of the query and key projections are reordered from DeepSeek's interleaved
        pairs (2i, 2i + 1) to (i, i + dim / 2): scores do not change, and `rotate` is everyone's.
        The output projection is called o_proj or dense. A g_proj [heads, hidden] is an output gate.
        """
        half_split = np.arange(self.rope).reshape(-1, 2).T.reshape(-1)
        key_order = np.r_[: self.kv_rank, self.kv_rank + half_split]
        params = self._take_query(
            tensors, prefix, np.r_[: self.nope, self.nope + half_split], dtype
        )
        name, shape = f"{prefix}.kv_a_proj_with_mqa", (self.kv_rank + self.rope, self.hidden)
        kv_a = blocks.take_linear(tensors, (name,), (shape,), dtype)
        params["kv_a"] = {name: value[..., key_order] for name, value in kv_a.items()}
        params["kv_a_norm"] = blocks.take_vector(
            tensors, f"{prefix}.kv_a_layernorm", self.kv_rank, dtype
        )
        kv_b = tensors.take(
            f"{prefix}.kv_b_proj.weight", (self.heads * (self.nope + self.value), self.kv_rank)
        ).reshape(self.heads, self.nope + self.value, self.kv_rank)
        params["key_up"] = blocks.to_device(kv_b[:, : self.nope], dtype)
        params["value_up"] = blocks.to_device(kv_b[:, self.nope :], dtype)
        out = "dense" if f"{prefix}.dense.weight" in tensors else "o_proj"
        params["out"] = blocks.take_linear(
            tensors, (f"{prefix}.{out}",), ((self.hidden, self.heads * self.value),), dtype
        )
        if f"{prefix}.g_proj.weight" in tensors:
            params["gate"] = blocks.take_linear(
                tensors, (f"{prefix}.g_proj",), ((self.heads, self.hidden),), dtype
            )
        return params

    def _take_query(
        self, tensors: TensorReader, prefix: str, order: np.ndarray, dtype: Any
    ) -> Params:
        """The query projection, low-rank or not; order: of each head's rows."""
        params: Params = {}
        name, width = f"{prefix}.q_proj", self.hidden
        if self.q_rank is not None:
            params["q_a"] = blocks.take_linear(
                tensors, (f"{prefix}.q_a_proj",), ((self.q_rank, self.hidden),), dtype
            )
            params["q_a_norm"] = blocks.take_vector(
                tensors, f"{prefix}.q_a_layernorm", self.q_rank, dtype
            )
            name, width = f"{prefix}.q_b_proj", self.q_rank
        query = tensors.take(f"{name}.weight", (self.heads * (self.nope + self.rope), width))
        query = query.reshape(self.heads, -1, width)[:, order]
        params["q"] = {"weight": blocks.to_device(query.reshape(-1, width).T, dtype)}
        return params

    def attend(
        self,
        layer: Params,
        x: jax.Array,
        cache: Any,
        inputs: StepInputs,
        cos_sin: CosSin | None,
    ) -> tuple[jax.Array, Any]:
        """x [R, W, hidden] -> (attention output [R, W, hidden], the layer's cache written).

        cache: the layer's `uhrc_full.pool.LatentLayer`. cos_sin: of the new tokens' positions; None
        rotates nothing (NoPE).
        """
        rows = x.shape[:2]
        query = x
        if "q_a" in layer:
            query = blocks.linear(x, layer["q_a"])
            query = blocks.rms_norm(query, layer["q_a_norm"], LATENT_NORM_EPS)
        query = blocks.linear(query, layer["q"]).reshape(*rows, self.heads, -1)
        q_nope, q_rope = query[..., : self.nope], query[..., self.nope :]

        latent = blocks.linear(x, layer["kv_a"])
        k_rope = latent[..., None, self.kv_rank :]
        if cos_sin is not None:
            q_rope, k_rope = rotate(q_rope, cos_sin), rotate(k_rope, cos_sin)
        compressed = latent[..., : self.kv_rank]
        compressed = blocks.rms_norm(compressed, layer["kv_a_norm"], LATENT_NORM_EPS)
        latent = jnp.concatenate([compressed, k_rope[..., 0, :]], axis=-1)
        places = inputs.places[ComponentType.FULL]
        cache = cache.write(latent.reshape(-1, latent.shape[-1]), places.write_indices.reshape(-1))

        absorbed = jnp.einsum("rwhn,hnk->rwhk", q_nope, layer["key_up"])
        attended = mla_attention(
            jnp.concatenate([absorbed, q_rope], axis=-1),
            cache,
            places.page_table,
            inputs.kv_lens,
            inputs.q_lens,
            scale=self.scale,
        )
        values = jnp.einsum("rwhk,hvk->rwhv", attended, layer["value_up"])
        if "gate" in layer:
            gate = jax.nn.sigmoid(blocks.linear(x, layer["gate"]).astype(jnp.float32))
            values = values * gate[..., None].astype(values.dtype)
        return blocks.linear(values.reshape(*rows, -1), layer["out"]), cache
