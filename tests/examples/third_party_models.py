"""The example's models: logits and states equal transformers', however the sequence is fed.

No `test_` in this file's name: `test_third_party_recurrent` runs it where the example is installed.
The goldens come from tests/oracle/make_mamba2.py; the weights are recreated from tensor names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.hybrid_runner import MAX_PAGES, PAGE_SIZE, Sequencer
from tests.oracle import hybrid, mamba2
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.recurrent import hybrid_layers
from uhrc_engine.models import model_from_config
from uhrc_engine.models.contract import make_step_inputs
from uhrc_engine.models.errors import UnsupportedModelError
from uhrc_engine.runner import Bucket, Buckets
from uhrc_engine.weights import Pretrained, load_pretrained
from uhrc_mamba2.backend import MAMBA2, Mamba2Params

GOLDENS = np.load(Path(__file__).parents[1] / "oracle" / "goldens" / "mamba2.npz")
CONFIGS = mamba2.CONFIGS
WIDTH = 192
ODD_CHUNKS = (0, 7, 71, 72, 105, 138, mamba2.GOLDEN_TOKENS)
TOLERANCE = 1e-4


def load(folder: Path, name: str, dtype: Any = jnp.float32) -> Pretrained:
    config = CONFIGS[name]
    return load_pretrained(hybrid.write_checkpoint(folder, config, mamba2.tensors(config)), dtype)


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


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_cache_plans_the_layers_that_the_model_runs(name: str) -> None:
    """`layer_caches` against what the cache reads in the same config, kind and size."""
    config = CONFIGS[name]
    planned = hybrid_layers(config, [MAMBA2])
    assert planned is not None
    caches = model_from_config(config).layer_caches
    for i, (cache, layer) in enumerate(zip(caches, planned, strict=True)):
        assert (cache.component is ComponentType.RECURRENT) == mamba2.is_mamba(config, i)
        if layer.component is ComponentType.RECURRENT:
            assert cache.shape == MAMBA2.state_layout(Mamba2Params(**layer.shape))
        else:
            assert cache.shape.kv_heads == layer.shape["num_kv_heads"]
            assert cache.shape.head_dim == layer.shape["head_dim"]


@pytest.mark.parametrize("name", ["bamba", "granite"])
@pytest.mark.parametrize("width", [1, 64])
def test_bfloat16_stays_bfloat16(tmp_path: Path, name: str, width: int) -> None:
    """Weights and conv states keep their dtype through a step, temporal states stay float32."""
    sequencer = Sequencer(load(tmp_path, name, jnp.bfloat16), dtype="bfloat16")
    row = sequencer.row(np.zeros(width, np.int32), 0, sequence=0, slot=0)
    inputs = make_step_inputs([row], width=width, max_pages=MAX_PAGES, page_size=PAGE_SIZE)
    runner = sequencer.runner
    caches = {kind: pool.buffers for kind, pool in runner.pools.items()}
    logits, written = jax.eval_shape(runner.model.forward, runner.params, caches, inputs)
    assert logits.dtype == jnp.float32
    assert jax.tree.structure(written) == jax.tree.structure(caches)
    for after, before in zip(jax.tree.leaves(written), jax.tree.leaves(caches), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bamba", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit = \[0.0, 0.1\] is not supp"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("granite", {"layer_types": ["attention"] * 2}, "no recurrent layers of a kind"),
        ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
    ],
)
def test_what_is_not_supported_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        model_from_config(CONFIGS[name] | change)
