"""Ling and Ring (`bailing_hybrid`): 2.5 is Lightning attention, 3.0 Kimi Delta Attention; both have
latent attention in between and experts after DeepSeek-V3's fashion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from uhrc_core.registry.recurrent import RecurrentBackendSpec
from uhrc_engine.models import blocks, moe
from uhrc_engine.models.contract import Params, TensorReader
from uhrc_engine.models.errors import UnsupportedModelError
from uhrc_engine.models.hybrid import CosSin, HybridDecoder, ModuleNames, Step, read_recurrent
from uhrc_engine.models.kda import KDA
from uhrc_engine.models.linear_attention import lightning, split
from uhrc_engine.models.mla import MLA
from uhrc_engine.models.rope import Rope, rope_from_config, rotate
from uhrc_recurrent import backends
from uhrc_recurrent.backends import GLAParams, KDAParams
from uhrc_recurrent.kernels.gla import GLATokens, bailing_log_decay

DECAY_BOUND = -5.0
"""Lowest log decay of the safe gate where the config does not say."""
ROPE_THETA = 6_000_000.0


class Bailing(HybridDecoder):
    """What Ling 2.5 and 3.0 share; `from_hf_config` gives the one the config is of."""

    backend: ClassVar[RecurrentBackendSpec] = backends.KDA
    """Of the recurrent layers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `from_hf_config`."""
        self.recurrent = read_recurrent(config, self.backend)
        self.mla_rope = _rope(config, config["qk_rope_head_dim"])
        self.mla = MLA.from_config(config, self.mla_rope.score_scale)
        super().__init__(config, self.backend, self.recurrent, self.mla.cache_shape)
        self.moe = moe.DeepSeekFeedForward.from_config(config, dense_layers=0)
        self.num_mtp_layers: int = config.get("num_nextn_predict_layers") or 0

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Bailing:
        """Reads config.json. Raises UnsupportedModelError for a kind that is neither, or for what
        the layers do not do."""
        blocks.require(config, "hidden_act", "silu")
        blocks.require(config, "rope_interleave", True)
        blocks.require(config, "score_function", "sigmoid")
        blocks.require(config, "use_bias", False)
        blocks.require(config, "use_qkv_bias", False)
        for model in (Ling3, Ling25):
            if model.backend.matches_hf_config(config):
                return model(config)
        raise UnsupportedModelError(
            "this bailing_hybrid says neither kda_* (Ling 3.0, kda) nor group_norm_size (Ling 2.5, "
            f"gla); architectures = {config.get('architectures')!r}"
        )

    def _names(self, tensors: TensorReader) -> ModuleNames:
        """The layers after the last are for multi-token prediction, and left unread."""
        layers = len(self.layer_caches)
        for i in range(layers, layers + self.num_mtp_layers):
            tensors.skip_under(f"model.layers.{i}")
        return ModuleNames(embedding="word_embeddings")

    def _load_feed_forward(
        self, tensors: TensorReader, index: int, prefix: str, dtype: Any
    ) -> Params:
        return self.moe.take(tensors, index, prefix, dtype)

    def _cos_sin(self, positions: jax.Array) -> CosSin:
        return self.mla_rope.cos_sin(positions)

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        return moe.feed_forward(layer, x, self.moe.routing)


class Ling3(Bailing):
    """Ling 3.0: KDA with full-rank gates; the latent attention has an output gate per head."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `Bailing.from_hf_config`."""
        super().__init__(config)
        sizes = cast("KDAParams", self.recurrent.params)
        safe = config.get("kda_safe_gate", True)
        self.kda = KDA(
            hidden=self.hidden,
            heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            conv_kernel=sizes.conv_kernel,
            norm_eps=self.norm_eps,
            low_rank=False,
            decay_bound=config.get("kda_lower_bound", DECAY_BOUND) if safe else None,
        )
        blocks.require(config, "no_kda_lora", True)

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        layer = self.kda if self.is_recurrent(index) else self.mla
        return layer.take(tensors, f"{prefix}.attention", dtype)

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        if self.is_recurrent(index):
            return self.kda.attend(mixer, x, cache, step.inputs)
        return self.mla.attend(mixer, x, cache, step.inputs, step.cos_sin)


class Ling25(Bailing):
    """Ling 2.5: Lightning attention with normed and partly rotated q and k, and an output norm on
    groups of heads."""

    backend = backends.GLA

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Use `Bailing.from_hf_config`."""
        super().__init__(config)
        sizes = cast("GLAParams", self.recurrent.params)
        self.heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.norm_groups: int = config["group_norm_size"]
        self.qk_norm: bool = config.get("use_qk_norm", True)
        self.rope = _rope(config, int(self.head_dim * config.get("partial_rotary_factor", 1.0)))
        blocks.require(config, "num_kv_heads_for_linear_attn", self.heads, None)

    def _load_mixer(self, tensors: TensorReader, index: int, prefix: str, dtype: Any) -> Params:
        prefix = f"{prefix}.attention"
        if not self.is_recurrent(index):
            return self.mla.take(tensors, prefix, dtype)
        width = self.heads * self.head_dim
        names = (f"{prefix}.query_key_value", f"{prefix}.g_proj")
        shapes = ((3 * width, self.hidden), (width, self.hidden))
        out = (f"{prefix}.dense",)
        mixer: Params = {
            "in": blocks.take_linear(tensors, names, shapes, dtype),
            "norm": blocks.take_vector(tensors, f"{prefix}.g_norm", width, jnp.float32),
            "out": blocks.take_linear(tensors, out, ((self.hidden, width),), dtype),
        }
        if self.qk_norm:
            for name in ("query", "key"):
                mixer[f"{name}_norm"] = blocks.take_vector(
                    tensors, f"{prefix}.{name}_layernorm", self.head_dim, jnp.float32
                )
        return mixer

    def _mix(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        if self.is_recurrent(index):
            return self._lightning(index, mixer, x, cache, step)
        return self.mla.attend(mixer, x, cache, step.inputs, step.cos_sin)

    def _lightning(
        self, index: int, mixer: Params, x: jax.Array, cache: Any, step: Step
    ) -> tuple[jax.Array, Any]:
        rows, width = x.shape[:2], self.heads * self.head_dim
        qkv, gate = split(blocks.linear(x, mixer["in"]), (3 * width, width))
        qkv = qkv.astype(jnp.float32).reshape(*rows, 3, self.heads, self.head_dim)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        if self.qk_norm:
            q, k = self._norm(q, mixer["query_norm"]), self._norm(k, mixer["key_norm"])
        cos_sin = self.rope.cos_sin(step.inputs.positions)
        q, k = rotate(q, cos_sin) * self.head_dim**-0.5, rotate(k, cos_sin)
        log_decay = bailing_log_decay(self.heads, index, len(self.layer_caches))
        out, cache = lightning(GLATokens(q, k, v), log_decay, cache, step.inputs)
        grouped = out.reshape(*rows, self.norm_groups, -1)
        out = self._norm(grouped, mixer["norm"].reshape(self.norm_groups, -1))
        out = out.reshape(*rows, width) * jax.nn.sigmoid(gate.astype(jnp.float32))
        return blocks.linear(out.astype(x.dtype), mixer["out"]), cache


def _rope(config: Mapping[str, Any], dim: int) -> Rope:
    return rope_from_config({"rope_theta": ROPE_THETA} | dict(config), dim)
