"""Makes goldens/hybrid_models.npz: float32 logits of the tiny hybrid models of hybrid.py.

Run in an environment with torch and transformers 5.24:  python tests/oracle/make_hybrid_models.py

The logits are transformers' of one forward over the whole sequence; its own prefill in pieces with
a cache and its own decode are checked to agree with it.

transformers 5.24 has bailing_hybrid only as Ling 3.0 (KDA); the two cases of Ling 2.5 (Lightning)
are computed by ling25.py in float64 from the published facts instead.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

sys.path.insert(0, str(Path(__file__).parent))
import hybrid
import ling25

PIECES = (37, 66, 1, 1, 27, 8)


def logits_of(name: str) -> np.ndarray:
    """float32[GOLDEN_TOKENS, vocab]."""
    config = hybrid.CONFIGS[name]
    weights = hybrid.tensors(config)
    if "group_norm_size" in config:
        return ling25.logits(config, weights, hybrid.golden_token_ids(name))
    with tempfile.TemporaryDirectory() as folder:
        hybrid.write_checkpoint(Path(folder), config | transformers_only(config), weights)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    info["missing_keys"] = {
        name for name in info["missing_keys"] if not name.endswith(("slope_rate", "_decay"))
    }  # computed from the config
    wrong = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert not any(wrong.values()), wrong
    ids = torch.tensor(hybrid.golden_token_ids(name)[None].astype(np.int64))
    minimax = config["model_type"] == "minimax"
    with torch.no_grad():
        whole = model.eval()(ids, use_cache=False).logits
        # MiniMaxCache counts its tokens in layer 0: pieces need that to be an attention layer.
        if not (minimax and hybrid.is_linear(config, 0)):
            cache = MiniMaxCache() if minimax else DynamicCache(config=model.config)
            pieces = [model(piece, cache=cache).logits for piece in ids.split(PIECES, dim=1)]
            difference = (torch.cat(pieces, dim=1) - whole).abs().max()
            assert difference < 1e-4, (name, difference)
    return whole[0].numpy()


def transformers_only(config: dict) -> dict:
    """The class names transformers goes by where the published config has others."""
    names = {"BailingMoeV3ForCausalLM": "BailingHybridForCausalLM"}
    return {"architectures": [names.get(name, name) for name in config["architectures"]]}


if __name__ == "__main__":
    goldens = {name: logits_of(name) for name in hybrid.CONFIGS}
    for name, logits in goldens.items():
        print(f"{name}: logits {logits.shape}, standard deviation {logits.std():.2f}")
    target = Path(__file__).parent / "goldens" / "hybrid_models.npz"
    np.savez_compressed(target, **goldens)
    print(f"{target.name}: {target.stat().st_size} bytes")
