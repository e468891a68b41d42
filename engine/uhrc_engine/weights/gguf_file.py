"""GGUF files of the llama architecture: an HF config, and dequantised tensors under HF names."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize

from uhrc_engine.models.errors import (
    CheckpointError,
    MissingTensorError,
    UnsupportedModelError,
)

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """An open (memory-mapped) GGUF file: its metadata by key, and its tensors as a TensorSource."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the file is absent or not GGUF."""
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
        self.path = path
        self._tensors = {_hf_name(t.name): t for t in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value (str, number, bool or list), or the default."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """A metadata value. Raises CheckpointError when the file lacks it."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path} has no metadata key {key!r}")
        return value

    def hf_config(self) -> dict[str, Any]:
        """The metadata in the terms of config.json. Raises UnsupportedModelError for another
        architecture than llama, or frequency factors stored as a tensor."""
        arch = self.need("general.architecture")
        if arch != "llama":
            raise UnsupportedModelError(
                f"{self.path} is a GGUF of architecture {arch!r}; supported: llama "
                "(use the model's Hugging Face directory instead)"
            )
        if "rope_freqs.weight" in self._tensors:
            raise UnsupportedModelError(
                f"{self.path} stores rope frequency factors as a tensor, which is not supported "
                "(use the model's Hugging Face directory instead)"
            )
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise MissingTensorError(f"{self.path} has no tensor 'token_embd.weight'")
        heads = self.need("llama.attention.head_count")
        hidden = self.need("llama.embedding_length")
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self.need("llama.feed_forward_length"),
            "num_hidden_layers": self.need("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("llama.attention.head_count_kv", heads),
            "head_dim": self.get("llama.attention.key_length", hidden // heads),
            "max_position_embeddings": self.need("llama.context_length"),
            "rms_norm_eps": self.need("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self.get("llama.rope.freq_base", 10000.0),
            "vocab_size": _shape(embedding)[0],
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
        }
        scaling = self.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            config["rope_scaling"] = {
                "type": scaling,
                "factor": self.need("llama.rope.scaling.factor"),
                "original_max_position_embeddings": self.get(
                    "llama.rope.scaling.original_context_length"
                ),
            }
        return config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `TensorSource`. GGUF stores dimensions in reverse order."""
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def load(self, name: str) -> npt.NDArray[Any]:
        """See `TensorSource`: float32, dequantised; q and k rows put back in HF's order."""
        tensor = self._tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape(_shape(tensor))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            key = "head_count" if name.endswith("q_proj.weight") else "head_count_kv"
            values = _half_split(values, self.need(f"llama.attention.{key}"))
        return values


@lru_cache(maxsize=1)
def _open(path: Path, _modified_ns: int) -> GGUFFile:
    return GGUFFile(path)


def open_gguf(path: Path) -> GGUFFile:
    """The file, opened once: parsing takes seconds, and weights and tokenizer share it."""
    try:
        return _open(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _hf_name(name: str) -> str:
    """The HF name of a GGUF tensor; an unknown name stays (and is reported as unexpected)."""
    match name.split("."):
        case ["blk", layer, module, kind] if module in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{kind}"
        case [module, kind] if module in _TOP_NAMES:
            return f"{_TOP_NAMES[module]}.{kind}"
        case _:
            return name


def _half_split(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """GGUF interleaves each head's rotary pairs (2i, 2i + 1); HF keeps them at (i, i + dim / 2)."""
    out, inputs = weight.shape
    pairs = weight.reshape(heads, out // heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(out, inputs)
