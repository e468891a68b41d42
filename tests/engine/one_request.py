"""One request through a whole engine, for the tests of models with layers of two kinds."""

from __future__ import annotations

import numpy as np

from uhrc_engine import Completion, Engine, Request

VOCAB = 1024


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random ones of the models' vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def one(engine: Engine, prompt: list[int], new_tokens: int = 4) -> Completion:
    [done] = engine.generate([Request(prompt, new_tokens)])
    engine.cache.check_invariants()
    return done


def same_bits(a: Completion, b: Completion) -> bool:
    """Of the tokens, and of the logits that the first one was sampled from."""
    assert a.first_logits is not None and b.first_logits is not None
    return a.token_ids == b.token_ids and np.array_equal(a.first_logits, b.first_logits)
