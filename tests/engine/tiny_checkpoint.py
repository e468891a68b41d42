"""A tiny Llama checkpoint on disk: weights from a seed, a byte tokenizer, a chat template.

Not smaller, since XLA's CPU kernels for still smaller matrices give a row other bits at other
heights, and then a hit computed in a narrower step is not bit-equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

SPECIALS = ("<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIALS)
EOS = VOCAB - 1
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(folder: Path) -> Path:
    """Writes config, weights and tokenizer; returns the folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_tensors(), folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    hidden, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 64

    def random(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.15).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": random(VOCAB, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for i in range(CONFIG["num_hidden_layers"]):
        tensors |= {
            f"model.layers.{i}.{name}.weight": random(*shape)
            for name, shape in {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = np.ones(hidden, np.float32)
    return tensors


def _tokenizer() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer
