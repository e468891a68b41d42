"""Mamba-2 models through UHRC's engine: a prefix hit changes when tokens come, never which."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from uhrc_core.config.loading import parse_config
from uhrc_core.plugin_api import ComponentType
from uhrc_engine import Completion, Engine, Request
from uhrc_engine.assembly import EngineParts, build_parts
from uhrc_engine.weights import load_seeded

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "bamba": {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1]},
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 128,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
    },
}
INTERVAL = 128


def config(page_size: int) -> dict[str, Any]:
    """With pages a state is kept at every interval, else where a request ended."""
    paged = page_size > 1
    return {
        "cache": {
            "enable_unified_radix_tree": True,
            "page_size": page_size,
            "max_requests": 2,
            "max_context_len": 512,
        },
        "components": {
            "full": {"num_tokens": 4096},
            "recurrent": {
                "backend": "mamba2",
                "enable_extra_buffer": paged,
                "num_slots": 24,
                "track_interval": INTERVAL if paged else 1,
            },
        },
        "scheduler": {"chunked_prefill_size": INTERVAL},
        "engine": {"prefill_widths": [INTERVAL], "decode_rows": [1]},
    }


@pytest.fixture(
    scope="module",
    params=[("bamba", 128), pytest.param(("granitemoehybrid", 1), marks=pytest.mark.slow)],
    ids=str,
)
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineParts:
    name, page_size = request.param
    folder = tmp_path_factory.mktemp(name)
    (folder / "config.json").write_text(json.dumps(COMMON | MODELS[name] | {"model_type": name}))
    return build_parts(load_seeded(folder, seed=3), parse_config(config(page_size)))


@pytest.fixture
def engine(parts: EngineParts) -> Engine:
    parts.cache.reset()
    return Engine(parts)


def one(engine: Engine, prompt: list[int]) -> Completion:
    [done] = engine.generate([Request(prompt, 4)])
    engine.cache.check_invariants()
    return done


def prompt_of(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 512, count).tolist()


def assert_same_bits(run: Completion, expected: Completion) -> None:
    assert run.token_ids == expected.token_ids
    assert run.first_logits is not None
    np.testing.assert_array_equal(run.first_logits, expected.first_logits)


def test_the_cache_is_full_and_recurrent_of_this_backend(parts: EngineParts) -> None:
    full, recurrent = parts.cache.components
    assert (full.kind, recurrent.kind) == (ComponentType.FULL, ComponentType.RECURRENT)
    [backend] = [part.context.backend for part in parts.resolved.components if part.context.backend]
    assert backend.name == "mamba2"


def test_hits_give_the_bits_of_an_engine_without_a_cache(
    parts: EngineParts, engine: Engine
) -> None:
    """The same prompt three times, then one that forks from it inside an interval, three times."""
    page_size = parts.cache.page_size
    prompt, fork = prompt_of(300, 1), prompt_of(300, 1)[:200] + prompt_of(90, 2)
    without = Engine(parts.without_reuse())
    none = {id(tokens): one(without, tokens) for tokens in (prompt, fork)}
    assert not any(done.cached_tokens for done in none.values())
    hits = []
    for tokens in (prompt, prompt, prompt, fork, fork, fork):
        done = one(engine, tokens)
        assert_same_bits(done, none[id(tokens)])
        hits.append(done.cached_tokens)
    if page_size > 1:
        assert hits == [0, 256, 256, 128, 256, 256]
    else:
        # The first run leaves a state behind its own last token alone; the second, finding none
        # where it could go on, leaves one on the kernel's grid.
        assert hits == [0, 0, 256, 0, 192, 256]
    assert engine.stats().cow_clones == sum(hit > 0 for hit in hits)


def test_a_state_that_a_request_goes_on_from_stays_as_it_was(
    parts: EngineParts, engine: Engine
) -> None:
    """Two continuations of one prefix, each twice and in turn."""
    shared = prompt_of(300, 5)
    turns = [shared + prompt_of(60, seed) for seed in (6, 7)]
    none = [one(Engine(parts.without_reuse()), turn) for turn in turns]
    for _ in range(2):
        one(engine, shared)
    for _ in range(2):
        for turn, expected in zip(turns, none, strict=True):
            done = one(engine, turn)
            assert done.cached_tokens >= 256
            assert_same_bits(done, expected)
