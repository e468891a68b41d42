"""Logits equal transformers' for every model family and option, however the sequence is fed.

The goldens come from tests/oracle/make_tiny_models.py; the weights are recreated from tensor names.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import tiny
from uhrc_core.kinds import ComponentType
from uhrc_engine.models.contract import StepRow, make_step_inputs
from uhrc_engine.runner import Bucket, Buckets, Runner
from uhrc_engine.weights import load_pretrained
from uhrc_full.layout import lay_out
from uhrc_full.pool import KVPool

GOLDENS = np.load(Path(__file__).parents[1] / "oracle" / "goldens" / "tiny_models.npz")
PAGE_SIZE, MAX_PAGES, POOL_TOKENS = 16, 12, 512
FULL = (0, tiny.GOLDEN_TOKENS)
ODD_CHUNKS = (0, 7, 71, 72, 105, 138, tiny.GOLDEN_TOKENS)
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=list(tiny.CONFIGS))
def case(request, tmp_path_factory):
    """(name, a runner over the loaded checkpoint)."""
    folder = tmp_path_factory.mktemp("checkpoint")
    loaded = load_pretrained(tiny.write_checkpoint(folder, request.param))
    shapes = [layer.shape for layer in loaded.model.layer_caches]
    pool = KVPool(lay_out(shapes, page_size=PAGE_SIZE, num_tokens=POOL_TOKENS))
    buckets = Buckets(prefill=(Bucket(1, 192),), decode_rows=(2,))
    runner = Runner(
        loaded.model, loaded.params, {ComponentType.FULL: pool}, buckets, max_pages=MAX_PAGES
    )
    return request.param, runner


def feed(runner: Runner, ids: np.ndarray, cuts: tuple[int, ...], width: int = 192) -> np.ndarray:
    """Logits after each chunk [cuts[i], cuts[i + 1]), over pages in a scattered order."""
    pages = np.random.default_rng(1).permutation(POOL_TOKENS // PAGE_SIZE)[:MAX_PAGES]
    logits = []
    for start, end in pairwise(cuts):
        row = StepRow(ids[start:end], start, {ComponentType.FULL: pages})
        inputs = make_step_inputs([row], width=width, max_pages=MAX_PAGES, page_size=PAGE_SIZE)
        logits.append(np.asarray(runner.step(inputs))[0])
    return np.stack(logits)


def test_full_prefill(case):
    name, runner = case
    logits = feed(runner, tiny.golden_token_ids(name), FULL)
    np.testing.assert_allclose(logits[0], GOLDENS[name][-1], atol=TOLERANCE, rtol=0)


def test_chunked_prefill_at_odd_lengths(case):
    name, runner = case
    logits = feed(runner, tiny.golden_token_ids(name), ODD_CHUNKS)
    expected = GOLDENS[name][np.array(ODD_CHUNKS[1:]) - 1]
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


def test_decode_after_prefill(case):
    name, runner = case
    ids, start = tiny.golden_token_ids(name), tiny.GOLDEN_TOKENS - 20
    feed(runner, ids, (0, start))
    logits = feed(runner, ids, tuple(range(start, tiny.GOLDEN_TOKENS + 1)), 1)
    np.testing.assert_allclose(logits, GOLDENS[name][start:], atol=TOLERANCE, rtol=0)
