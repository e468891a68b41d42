"""Logits equal transformers' for every hybrid family and option, however the sequence is fed.

The goldens come from tests/oracle/make_hybrid_models.py; the weights are recreated from tensor
names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine import hybrid_runner
from tests.oracle import hybrid
from uhrc_engine.runner import Bucket, Buckets

GOLDENS = np.load(Path(__file__).parents[1] / "oracle" / "goldens" / "hybrid_models.npz")
WIDTH = 192
ODD_CHUNKS = (0, 7, 71, 72, 105, 138, hybrid.GOLDEN_TOKENS)
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", list(hybrid.CONFIGS))
def test_logits_equal_the_oracle(tmp_path, name):
    """One prefill, a prefill in odd chunks, and decode steps after a prefill."""
    buckets = Buckets(prefill=(Bucket(1, WIDTH),), decode_rows=(2,))
    sequencer = hybrid_runner.Sequencer(hybrid_runner.load(tmp_path, hybrid.CONFIGS[name]), buckets)
    ids, golden, tokens = hybrid.golden_token_ids(name), GOLDENS[name], hybrid.GOLDEN_TOKENS

    def check(what: str, logits: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0, err_msg=what)

    check("prefill", sequencer.feed(ids, (0, tokens), WIDTH)[0], golden[-1])
    chunks = sequencer.feed(ids, ODD_CHUNKS, WIDTH, sequence=1, slot=3)
    check("chunked prefill", chunks, golden[np.array(ODD_CHUNKS[1:]) - 1])
    start = tokens - 20
    sequencer.feed(ids, (0, start), WIDTH, sequence=2, slot=5)
    decoded = sequencer.feed(ids, range(start, tokens + 1), 1, sequence=2, slot=5)
    check("decode", decoded, golden[start:])
