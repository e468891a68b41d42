"""Makes goldens/smollm2.npz: transformers' greedy continuations of SmolLM2-135M-Instruct, float32.

transformers reads and dequantises the same GGUF file itself. Run in an environment with torch and
transformers:  python tests/oracle/make_smollm2.py PATH_OF_THE_GGUF_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import smollm2_prompts


def load(path: Path) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    wrong = model.load_state_dict(state, strict=False)
    assert wrong.missing_keys == ["lm_head.weight"] and not wrong.unexpected_keys, wrong
    model.tie_weights()
    return model


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[np.ndarray, np.ndarray, float]:
    """(first-token logits, greedy tokens past any end token, smallest lead of a chosen token)."""
    ids, cache, tokens, first, lead = torch.tensor([prompt]), None, [], None, np.inf
    for _ in range(smollm2_prompts.NEW_TOKENS):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = out.logits[0, -1].numpy(), out.past_key_values
        first = logits.copy() if first is None else first
        best, second = np.sort(logits)[[-1, -2]]
        lead = min(lead, float(best - second))
        tokens.append(int(logits.argmax()))
        ids = torch.tensor([tokens[-1:]])
    return first, np.array(tokens, np.int32), lead


if __name__ == "__main__":
    path = Path(sys.argv[1])
    model, tokenizer = load(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    goldens: dict[str, np.ndarray] = {}
    for i, messages in enumerate(smollm2_prompts.CONVERSATIONS):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        first, tokens, lead = greedy(model, prompt)
        top = np.argsort(-first)[: smollm2_prompts.TOP_LOGITS].astype(np.int32)
        goldens |= {
            f"prompt_{i}": np.array(prompt, np.int32),
            f"tokens_{i}": tokens,
            f"top_ids_{i}": top,
            f"top_logits_{i}": first[top],
            f"strided_logits_{i}": first[:: smollm2_prompts.LOGIT_STRIDE],
        }
        print(f"{i}: {len(prompt)} tokens, lead {lead:.4f}: {tokenizer.decode(tokens)[:70]!r}")
    target = Path(__file__).parent / "goldens" / "smollm2.npz"
    np.savez_compressed(target, **goldens)
    print(f"{target.name}: {target.stat().st_size} bytes")
