"""Logits equal transformers' for every family with windows, however the sequence is fed, and from
nothing but what the windows hold.

The goldens come from tests/oracle/make_swa_models.py; the weights are recreated from tensor names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.swa_runner import WindowSequencer
from tests.oracle import swa
from uhrc_core.kinds import ComponentType
from uhrc_engine.models import model_from_config
from uhrc_engine.runner import Bucket, Buckets
from uhrc_engine.weights import load_pretrained
from uhrc_full.model_layers import full_layers
from uhrc_swa.model_layers import window_layers

GOLDENS = np.load(Path(__file__).parents[1] / "oracle" / "goldens" / "swa_models.npz")
WIDTH = 192
ODD_CHUNKS = (0, 7, 71, 72, 105, 138, swa.GOLDEN_TOKENS)
TOLERANCE = 1e-4
CASES = [(name, 16) for name in swa.CONFIGS]
CASES += [("mistral_16", 1), ("gpt_oss_33", 4), ("gemma3_7", 128)]


@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_logits_equal_the_oracle(tmp_path, name, page_size):
    """One prefill, a prefill in odd chunks, and decode steps after a prefill in pages of 16."""
    config, ids, golden = swa.CONFIGS[name], swa.golden_token_ids(name), GOLDENS[name]
    loaded = load_pretrained(swa.write_checkpoint(tmp_path, config))
    buckets = Buckets(prefill=(Bucket(1, WIDTH),), decode_rows=(2,))
    window = config["sliding_window"] or swa.GOLDEN_TOKENS
    sequencer = WindowSequencer(loaded, buckets, page_size, window)

    def check(what: str, logits: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0, err_msg=what)

    end = swa.GOLDEN_TOKENS
    check("prefill", sequencer.feed(ids, (0, end), WIDTH)[0], golden[-1])
    chunks = sequencer.feed(ids, ODD_CHUNKS, WIDTH)
    check("chunked prefill", chunks, golden[np.array(ODD_CHUNKS[1:]) - 1])
    sequencer.feed(ids, range(0, 97, 16), WIDTH)
    decoded = sequencer.feed(ids, range(96, end + 1), 1)
    check("decode", decoded, golden[96:])


@pytest.mark.parametrize("name", list(swa.CONFIGS))
def test_the_cache_plans_the_layers_that_the_model_runs(name):
    """`layer_caches` against what the cache reads in the same config: kind, size and window."""
    config = swa.CONFIGS[name]
    model = model_from_config(config)
    planned = window_layers(config) or full_layers(config)
    assert planned is not None
    assert [cache.component for cache in model.layer_caches] == [
        layer.component for layer in planned
    ]
    for cache, attention, layer in zip(model.layer_caches, model.attention, planned, strict=True):
        assert cache.shape.kv_heads == layer.shape["num_kv_heads"]
        assert cache.shape.head_dim == layer.shape["head_dim"]
        assert attention.window_tokens == layer.shape.get("window_tokens")
        assert (layer.component is ComponentType.SWA) == (attention.window_tokens is not None)
