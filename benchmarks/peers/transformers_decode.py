"""transformers' side of device_decode.py: loads the GGUF file, then measures what stdin asks for.

Each input line is {"prefix", "prefill", "decode"} (tokens); each output line the seconds of each
part: {"prefill": s, "decode": s per token}. Runs in an interpreter that has torch and transformers.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def load(path: Path) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


@torch.no_grad()
def measure(model: torch.nn.Module, prefix: int, prefill: int, decode: int) -> dict[str, float]:
    ids = torch.randint(0, 40000, (1, prefix + prefill), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache()
    if prefix:
        model(ids[:, :prefix], past_key_values=cache, logits_to_keep=1)
    start = time.perf_counter()
    logits = model(ids[:, prefix:], past_key_values=cache, logits_to_keep=1).logits
    token = logits[:, -1].argmax(-1, keepdim=True)
    middle = time.perf_counter()
    for _ in range(decode):
        token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
    end = time.perf_counter()
    return {"prefill": middle - start, "decode": (end - middle) / max(decode, 1)}


if __name__ == "__main__":
    model = load(Path(sys.argv[1]))
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps({"ready": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(model, **json.loads(line))), flush=True)
