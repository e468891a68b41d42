"""Makes goldens/recall.npz: transformers' answers of the trained model in configs/recall.

Run in an environment with torch and transformers:  python tests/oracle/make_recall.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "engine"))
from uhrc_engine.recall.task import make_cases  # noqa: E402

SEED = 7
DOCUMENTS, QUESTIONS = 2, 8

if __name__ == "__main__":
    model, info = AutoModelForCausalLM.from_pretrained(
        ROOT / "configs" / "recall",
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    wrong = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert not any(wrong.values()), wrong
    cases = make_cases(SEED, DOCUMENTS, QUESTIONS)
    prompts = np.stack([case.prompt for case in cases])
    with torch.no_grad():
        logits = model.eval()(torch.tensor(prompts.astype(np.int64))).logits[:, -1].numpy()
    expected = np.array([case.expected for case in cases], np.int32)
    answers = logits.argmax(-1).astype(np.int32)
    print(f"{(answers == expected).mean():.4f} of {len(cases)} answers are right")
    target = Path(__file__).parent / "goldens" / "recall.npz"
    np.savez_compressed(
        target, prompts=prompts.astype(np.uint8), logits=logits, answers=answers, expected=expected
    )
    print(f"{target.name}: {target.stat().st_size} bytes")
