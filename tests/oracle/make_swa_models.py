"""Makes goldens/swa_models.npz: transformers' float32 logits of the tiny models of swa.py.

Run in an environment with torch and transformers 5.24:  python tests/oracle/make_swa_models.py

The logits are of one forward over the whole sequence, with masks for the windows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
import swa


def logits_of(name: str) -> np.ndarray:
    """float32[GOLDEN_TOKENS, vocab]."""
    with tempfile.TemporaryDirectory() as folder:
        swa.write_checkpoint(Path(folder), swa.CONFIGS[name])
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    wrong = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert not any(wrong.values()), wrong
    ids = torch.tensor(swa.golden_token_ids(name)[None].astype(np.int64))
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits[0].numpy()


if __name__ == "__main__":
    goldens = {name: logits_of(name) for name in swa.CONFIGS}
    for name, logits in goldens.items():
        print(f"{name}: logits {logits.shape}, standard deviation {logits.std():.2f}")
    target = Path(__file__).parent / "goldens" / "swa_models.npz"
    np.savez_compressed(target, **goldens)
    print(f"{target.name}: {target.stat().st_size} bytes")
