"""The real model: SmolLM2-135M-Instruct says what transformers' greedy decoding says.

Goldens: tests/oracle/make_smollm2.py. The weights are downloaded once (98 MB); without a network
and without them these tests fail, saying so.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.oracle import smollm2_prompts as golden
from uhrc_core.kinds import ComponentType
from uhrc_engine.models.contract import StepRow, make_step_inputs
from uhrc_engine.runner import Bucket, Buckets, Runner
from uhrc_engine.sampling import SamplingParams, sample
from uhrc_engine.tokenizer import Tokenizer
from uhrc_engine.weights import load_pretrained
from uhrc_engine.weights.smollm2 import fetch_smollm2
from uhrc_full.layout import lay_out
from uhrc_full.pool import KVPool

GOLDENS = np.load(Path(__file__).parents[1] / "oracle" / "goldens" / "smollm2.npz")
COUNT = len(golden.CONVERSATIONS)
PAGE_SIZE, MAX_PAGES, CHUNK = 16, 40, 192
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def path() -> Path:
    return fetch_smollm2()


@pytest.fixture(scope="module")
def answers(path):
    """(first logits float32[COUNT, vocab], greedy tokens int32[COUNT, NEW_TOKENS])."""
    loaded = load_pretrained(path)
    context = MAX_PAGES * PAGE_SIZE
    shapes = [layer.shape for layer in loaded.model.layer_caches]
    pool = KVPool(lay_out(shapes, page_size=PAGE_SIZE, num_tokens=COUNT * context))
    buckets = Buckets(prefill=(Bucket(1, CHUNK),), decode_rows=(COUNT,))
    runner = Runner(
        loaded.model, loaded.params, {ComponentType.FULL: pool}, buckets, max_pages=MAX_PAGES
    )

    def step(rows, width):
        return runner.step(
            make_step_inputs(rows, width=width, max_pages=MAX_PAGES, page_size=PAGE_SIZE)
        )

    prompts = [GOLDENS[f"prompt_{i}"] for i in range(COUNT)]
    pages = np.arange(COUNT * context // PAGE_SIZE, dtype=np.int32).reshape(COUNT, -1)
    first = np.zeros((COUNT, loaded.model.vocab_size), np.float32)
    for i, prompt in enumerate(prompts):
        for start in range(0, len(prompt), CHUNK):
            first[i] = step(
                [StepRow(prompt[start : start + CHUNK], start, {ComponentType.FULL: pages[i]})],
                CHUNK,
            )[0]
    tokens = [first.argmax(axis=-1)]
    for new in range(golden.NEW_TOKENS - 1):
        rows = [
            StepRow([tokens[-1][i]], len(prompts[i]) + new, {ComponentType.FULL: pages[i]})
            for i in range(COUNT)
        ]
        tokens.append(sample(step(rows, 1), [SamplingParams()] * COUNT, [0] * COUNT))
    return first, np.stack(tokens, axis=1)


def test_prompts_are_tokenised_alike(path):
    tokenizer = Tokenizer.from_pretrained(path)
    for i, messages in enumerate(golden.CONVERSATIONS):
        assert tokenizer.encode_chat(messages) == GOLDENS[f"prompt_{i}"].tolist()


def test_first_token_logits_agree(answers):
    for i in range(COUNT):
        logits = answers[0][i]
        for got, name in (
            (logits[GOLDENS[f"top_ids_{i}"]], "top_logits"),
            (logits[:: golden.LOGIT_STRIDE], "strided_logits"),
        ):
            np.testing.assert_allclose(got, GOLDENS[f"{name}_{i}"], atol=TOLERANCE, rtol=0)


def test_greedy_tokens_are_equal(answers):
    for i in range(COUNT):
        assert answers[1][i].tolist() == GOLDENS[f"tokens_{i}"].tolist()
