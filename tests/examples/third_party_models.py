"""Logits and states of the example's models equal transformers', however the sequence is fed.

No `test_` in this file's name: `test_third_party_recurrent` runs it where the example is installed.
The goldens come from tests/oracle/make_mamba2.py; the weights are recreated from tensor names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.hybrid_runner import Sequencer
from tests.oracle import hybrid, mamba2
from uhrc_engine.runner import Bucket, Buckets
from uhrc_engine.weights import Pretrained, load_pretrained

GOLDENS = np.load(Path(__file__).parents[1] / "oracle" / "goldens" / "mamba2.npz")
CONFIGS = mamba2.CONFIGS
WIDTH = 192
ODD_CHUNKS = (0, 7, 71, 72, 105, 138, mamba2.GOLDEN_TOKENS)
TOLERANCE = 1e-4


def load(folder: Path, name: str) -> Pretrained:
    config = CONFIGS[name]
    return load_pretrained(hybrid.write_checkpoint(folder, config, mamba2.tensors(config)))


@pytest.mark.parametrize(
    "name",
    ["bamba", *(pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS if n != "bamba")],
)
def test_logits_and_states_equal_the_oracle(tmp_path: Path, name: str) -> None:
    """One prefill, a prefill in odd chunks, and decode steps after a prefill."""
    buckets = Buckets(prefill=(Bucket(1, WIDTH),), decode_rows=(1,))
    sequencer = Sequencer(load(tmp_path, name), buckets)
    ids, golden, tokens = mamba2.golden_token_ids(name), GOLDENS[name], mamba2.GOLDEN_TOKENS

    def check(what: str, slot: int, logits: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0, err_msg=what)
        if f"{name}.temporal" in GOLDENS:
            check_states(sequencer, slot, name)

    check("prefill", 0, sequencer.feed(ids, (0, tokens), WIDTH)[0], golden[-1])
    chunks = sequencer.feed(ids, ODD_CHUNKS, WIDTH, sequence=1, slot=3)
    check("chunked prefill", 3, chunks, golden[np.array(ODD_CHUNKS[1:]) - 1])
    start = tokens - 20
    sequencer.feed(ids, (0, start), WIDTH, sequence=2, slot=5)
    decoded = sequencer.feed(ids, range(start, tokens + 1), 1, sequence=2, slot=5)
    check("decode", 5, decoded, golden[start:])


def check_states(sequencer: Sequencer, slot: int, name: str) -> None:
    """Every layer's state; of the convolution's inputs transformers keeps one more, the first."""
    states = sequencer.states.read([slot])
    temporal = np.stack([state.temporal[0] for state in states])
    convs = np.stack([np.concatenate([conv[0] for conv in state.convs], -1) for state in states])
    np.testing.assert_allclose(temporal, GOLDENS[f"{name}.temporal"], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(convs, GOLDENS[f"{name}.conv"][:, 1:], atol=TOLERANCE, rtol=0)
