"""Makes goldens/mamba2.npz: float32 logits of the tiny hybrids of mamba2.py, and final states.

Run in an environment with torch and transformers 5.24:  python tests/oracle/make_mamba2.py

The logits are transformers' of one forward over the whole sequence; its own prefill in pieces with
a cache and its own decode are checked to agree with it. `<name>.temporal` [layers, heads, head_dim,
state] and `<name>.conv` [layers, kernel, channels] are the states of the Mamba-2 layers after the
last token, as transformers keeps them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

sys.path.insert(0, str(Path(__file__).parent))
import hybrid
import mamba2

PIECES = (37, 66, 1, 1, 27, 8)
WITH_STATES = ("bamba",)


def goldens_of(name: str) -> dict[str, np.ndarray]:
    """Logits float32[GOLDEN_TOKENS, vocab], and the states of a case in WITH_STATES."""
    config = mamba2.CONFIGS[name]
    with tempfile.TemporaryDirectory() as folder:
        hybrid.write_checkpoint(Path(folder), config, mamba2.tensors(config))
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    wrong = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert not any(wrong.values()), wrong
    ids = torch.tensor(mamba2.golden_token_ids(name)[None].astype(np.int64))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model.eval()(ids, cache=cache).logits
        positions = torch.arange(ids.shape[1])[None]  # transformers' Bamba would count from 0 again
        again = DynamicCache(config=model.config)
        pieces = [
            model(piece, cache=again, position_ids=at).logits
            for piece, at in zip(ids.split(PIECES, 1), positions.split(PIECES, 1), strict=True)
        ]
    difference = (torch.cat(pieces, dim=1) - whole).abs().max()
    assert difference < 1e-4, (name, difference)
    goldens = {name: whole[0].numpy()}
    if name in WITH_STATES:
        layers = [i for i in range(len(model.model.layers)) if mamba2.is_mamba(config, i)]
        temporal = [cache.get_recurrent_state(i, state_idx=0)[0].numpy() for i in layers]
        conv = [cache.get_conv_state(i, state_idx=0)[0].numpy().T for i in layers]
        goldens |= {f"{name}.temporal": np.stack(temporal), f"{name}.conv": np.stack(conv)}
    return goldens


if __name__ == "__main__":
    goldens = {key: array for name in mamba2.CONFIGS for key, array in goldens_of(name).items()}
    for name, array in goldens.items():
        print(f"{name}: {array.shape} {array.dtype}, standard deviation {array.std():.2f}")
    target = Path(__file__).parent / "goldens" / "mamba2.npz"
    np.savez_compressed(target, **goldens)
    print(f"{target.name}: {target.stat().st_size} bytes")
