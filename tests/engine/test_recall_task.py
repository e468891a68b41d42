"""The recall task: what a document says, what is asked, and how answers are counted."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from uhrc_engine.recall import network, task
from uhrc_engine.recall.task import Document, DocumentShape
from uhrc_recurrent.kernels.delta import DeltaTokens
from uhrc_recurrent.kernels.kda import kda_prefill

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "configs" / "recall"
GOLDENS = np.load(ROOT / "tests" / "oracle" / "goldens" / "recall.npz")
SHAPE = DocumentShape(tokens=128, constants=6, variables=2, assignments=3)


def document(seed: int = 0, shape: DocumentShape = SHAPE) -> Document:
    return task.make_document(np.random.default_rng(seed), shape)


def assignments_of(made: Document) -> list[tuple[int, int, int]]:
    """(position, name, value) of every pair, in order."""
    ids = made.token_ids.tolist()
    return [(i, ids[i], ids[i + 1]) for i in range(len(ids) - 1) if ids[i] in made.values]


def test_the_kinds_of_tokens_are_disjoint_and_fill_the_vocabulary():
    kinds = [task.CONSTANTS, task.VARIABLES, task.VALUES, task.FILLER]
    ids = [i for kind in kinds for i in kind]
    assert ids == list(range(8, task.VOCAB_SIZE))
    assert task.ANSWER < 8


def test_the_same_seed_gives_the_same_document():
    assert document(3).token_ids.tolist() == document(3).token_ids.tolist()
    assert document(3).token_ids.tolist() != document(4).token_ids.tolist()


def test_every_name_is_followed_by_its_values_and_the_last_one_counts():
    made = document()
    pairs = assignments_of(made)
    assert made.token_ids.shape == (128,)
    assert made.token_ids[0] == task.BOS
    assert len(pairs) == 6 + 2 * 3
    assert all(value in task.VALUES for _, _, value in pairs)
    assert {name: value for _, name, value in pairs} == made.values
    for name in made.values:
        times = sum(pair[1] == name for pair in pairs)
        assert times == (3 if name in task.VARIABLES else 1)


def test_constants_stand_in_the_first_part_and_the_last_is_filler():
    pairs = assignments_of(document())
    assert max(i for i, name, _ in pairs if name in task.CONSTANTS) < 49
    assert max(i for i, _, _ in pairs) < 97


def test_a_document_too_short_for_its_pairs_is_refused():
    with pytest.raises(ValueError, match="puts 26 and 4 pairs into parts of 47 and 47 tokens"):
        DocumentShape(tokens=128, constants=24, variables=2)


def test_cases_share_their_document_and_ask_for_different_names():
    cases = task.make_cases(5, documents=3, questions=4, shape=SHAPE)
    assert [case.document for case in cases] == [0, 1, 2] * 4
    for d in range(3):
        own = [case for case in cases if case.document == d]
        assert len({case.prompt[:128].tobytes() for case in own}) == 1
        assert len({case.name for case in own}) == 4
        assert sum(case.name in task.VARIABLES for case in own) == 2
        for case in own:
            assert case.prompt[128:].tolist() == [task.ASK, case.name, task.ANSWER]
            pairs = {
                int(name): int(value)
                for name, value in zip(case.prompt[:127], case.prompt[1:128], strict=True)
                if name == case.name
            }
            assert case.expected == pairs[case.name]
    assert len({case.prompt.tobytes() for case in cases}) == 12


def test_more_questions_than_names_are_refused():
    with pytest.raises(ValueError, match="questions: 9 of a document with 8 names"):
        task.make_cases(0, documents=1, questions=9, shape=SHAPE)


def test_accuracy_counts_first_tokens():
    cases = task.make_cases(0, documents=2, questions=2, shape=SHAPE)
    answers = [[case.expected, 0] for case in cases]
    answers[1] = [cases[1].expected + 1, cases[1].expected]
    answers[2] = []
    assert task.accuracy(cases, answers) == 0.5


def test_a_training_row_is_a_document_and_questions_with_their_answers():
    tokens, targets = task.make_batch(np.random.default_rng(0), 2, questions=5, shape=SHAPE)
    assert tokens.shape == targets.shape == (2, 128 + 5 * 4)
    for row, target in zip(tokens, targets, strict=True):
        asked = np.flatnonzero(target >= 0)
        assert asked.tolist() == list(range(130, 148, 4))
        assert target[asked].tolist() == row[asked + 1].tolist()
        values = dict(zip(row[:127].tolist(), row[1:128].tolist(), strict=True))
        assert target[asked].tolist() == [values[name] for name in row[asked - 1].tolist()]


def test_the_training_form_of_kda_is_the_kernel():
    rng = np.random.default_rng(1)
    q, k, v, decay = (jnp.asarray(rng.standard_normal((2, 37, 2, 8)), jnp.float32) for _ in "qkvg")
    decay, beta = -4 * jax.nn.sigmoid(decay), jax.nn.sigmoid(q[..., :1])  # above LOG_DECAY_MIN
    state, lens = jnp.zeros((2, 2, 8, 8)), jnp.full(2, 37)
    tokens = DeltaTokens(q, k, v, decay, beta)
    expected, _ = kda_prefill(tokens, state, lens, implementation="reference")
    q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    out = network.delta_rule(q * 8**-0.5, k, v, decay, beta)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_the_shipped_checkpoint_is_of_the_script_and_small():
    assert json.loads((CHECKPOINT / "config.json").read_text()) == network.CONFIG
    tensors = load_file(CHECKPOINT / "model.safetensors")
    fresh = network.init_weights(network.CONFIG, seed=0)
    assert {name: x.shape for name, x in tensors.items()} == {
        name: x.shape for name, x in fresh.items()
    }
    assert sum(x.nbytes for x in tensors.values()) < 2e6


def test_the_trained_model_computes_what_transformers_does():
    """The goldens come from tests/oracle/make_recall.py: held-out documents of 512 tokens."""
    tensors = load_file(CHECKPOINT / "model.safetensors")
    weights = {name: jnp.asarray(x) for name, x in tensors.items()}
    prompts = GOLDENS["prompts"].astype(np.int32)
    last = jax.jit(lambda ids: network.forward(network.CONFIG, weights, ids)[:, -1])
    np.testing.assert_allclose(last(prompts), GOLDENS["logits"], atol=1e-3, rtol=0)


def test_the_goldens_are_the_task_and_the_answers_are_right():
    cases = task.make_cases(7, documents=2, questions=8)
    assert np.stack([case.prompt for case in cases]).tolist() == GOLDENS["prompts"].tolist()
    assert task.accuracy(cases, GOLDENS["answers"][:, None].tolist()) > 0.95
