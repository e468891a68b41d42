"""Hybrid models through the whole engine: a hit changes when tokens come, never which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.one_request import one, same_bits, tokens
from uhrc_core.config.loading import parse_config
from uhrc_core.kinds import ComponentType
from uhrc_engine import Engine, Request
from uhrc_engine.assembly import EngineParts, build_parts
from uhrc_engine.weights import load_seeded

HYBRIDS = Path(__file__).parents[2] / "configs" / "hybrid"
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128}
LAYERS: dict[str, dict[str, Any]] = {
    "kda": {
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        }
    },
    "gdn": {"layer_types": ["linear_attention", "full_attention"]},
    "gla": {"layer_types": ["linear_attention", "full_attention"]},
}
INTERVAL = 128


def config(page_size: int) -> dict[str, Any]:
    paged = page_size > 1
    return {
        "cache": {
            "enable_unified_radix_tree": True,
            "page_size": page_size,
            "max_requests": 2,
            "max_context_len": 768,
        },
        "components": {
            "full": {"num_tokens": 4096},
            "recurrent": {
                "enable_extra_buffer": paged,
                "num_slots": 24,
                "track_interval": INTERVAL if paged else 1,
            },
        },
        "scheduler": {"chunked_prefill_size": INTERVAL},
        "engine": {"prefill_widths": [INTERVAL], "decode_rows": [2]},
    }


@pytest.fixture(scope="module", params=list(LAYERS))
def pretrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name = request.param
    published = json.loads((HYBRIDS / name / "config.json").read_text())
    folder = tmp_path_factory.mktemp(name)
    (folder / "config.json").write_text(json.dumps(published | SMALL | LAYERS[name]))
    return load_seeded(folder, seed=3)


@pytest.fixture(scope="module", params=[128, 1])
def parts(request: pytest.FixtureRequest, pretrained: Any) -> EngineParts:
    made = build_parts(pretrained, parse_config(config(request.param)))
    Engine(made).warmup()
    return made


@pytest.fixture
def engine(parts: EngineParts) -> Engine:
    parts.cache.reset()
    return Engine(parts)


@pytest.mark.parametrize("length", [3 * INTERVAL - 1, 3 * INTERVAL, 3 * INTERVAL + 1, 449])
def test_the_same_prompt_three_times_gives_the_same_bits(
    parts: EngineParts, engine: Engine, length: int
) -> None:
    prompt = tokens(length, length)
    none = one(Engine(parts.without_reuse()), prompt)
    runs = [one(engine, prompt) for _ in range(3)]
    assert all(same_bits(run, none) for run in runs)
    hits = [run.cached_tokens for run in runs]
    if parts.cache.page_size > 1:
        # A state lies at every interval; what ends the prompt is computed anew.
        boundary = (length - 1) // INTERVAL * INTERVAL
        assert hits == [0, boundary, boundary]
    else:
        # No state but the first run's last one; the second keeps one on the kernel's grid.
        assert hits == [0, 0, (length - 1) // 64 * 64]


def test_a_fork_inside_an_interval_is_hit_by_the_third(parts: EngineParts, engine: Engine) -> None:
    shared = tokens(200)
    prompts = [shared + tokens(100, seed) for seed in (1, 2, 3)]
    none = [one(Engine(parts.without_reuse()), prompt) for prompt in prompts]
    runs = [one(engine, prompt) for prompt in prompts]
    assert all(map(same_bits, runs, none))
    page_size = parts.cache.page_size
    fork = 200 // max(page_size, 64) * max(page_size, 64)
    first = fork if page_size > 1 else 0
    assert [run.cached_tokens for run in runs] == [0, first, fork]


def test_the_next_turn_continues_from_what_was_decoded(parts: EngineParts, engine: Engine) -> None:
    """Decoded tokens may differ from prefilled ones in the last bits; the answers do not."""
    prompt = tokens(250)
    without = Engine(parts.without_reuse())
    first = one(without, prompt, new_tokens=20)
    turn = prompt + first.token_ids + tokens(40, 9)
    cold = one(without, turn)  # before the other engine: both write to the same pools
    assert one(engine, prompt, new_tokens=20).token_ids == first.token_ids
    warm = one(engine, turn)
    # The base path hits at any length: the state when its last token but one was computed.
    assert warm.cached_tokens == (2 * INTERVAL if parts.cache.page_size > 1 else 269)
    assert warm.token_ids == cold.token_ids
    assert warm.first_logits is not None and cold.first_logits is not None
    np.testing.assert_allclose(warm.first_logits, cold.first_logits, atol=1e-4)


def test_requests_of_one_step_do_not_share_a_state(parts: EngineParts, engine: Engine) -> None:
    prompts = [tokens(300, 5), tokens(300, 5), tokens(280, 6)]
    none = [one(Engine(parts.without_reuse()), prompt) for prompt in prompts]
    done = engine.generate([Request(prompt, 4) for prompt in prompts])
    engine.cache.check_invariants()
    assert [run.token_ids for run in done] == [run.token_ids for run in none]


def test_a_hit_is_one_clone_and_nothing_compiles_after_warm_up(engine: Engine) -> None:
    prompt, compiled = tokens(2 * INTERVAL + 5), engine.stats().compiled_programs
    for _ in range(3):
        one(engine, prompt)
    stats = engine.stats()
    assert stats.cow_clones == (2 if engine.cache.page_size > 1 else 1)
    assert stats.compiled_programs == compiled
    assert stats.cache.inserted_num_snapshots >= 2


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_every_step_loses_no_slot_and_spoils_no_state(
    parts: EngineParts, engine: Engine, steps: int
) -> None:
    prompt = tokens(2 * INTERVAL + 40, 8)
    expected = one(Engine(parts.without_reuse()), prompt)
    one(engine, prompt)
    one(engine, prompt)
    rid = engine.add_request(Request(prompt + tokens(200, 4), 8))
    for _ in range(steps):
        engine.step()
        engine.cache.check_invariants()
    engine.abort(rid)
    while engine.has_work:
        engine.step()
    engine.cache.check_invariants()
    pool = engine.cache
    slots = ComponentType.RECURRENT
    assert pool.available_size(slots) + pool.evictable_size(slots) == 24
    assert same_bits(one(engine, prompt), expected)


def test_the_peak_of_slots_is_the_requests_own_and_the_trees(
    parts: EngineParts, engine: Engine
) -> None:
    without = Engine(parts.without_reuse())
    for running in (without, engine):
        one(running, tokens(2 * INTERVAL + 1))
        assert running.stats().window_tokens_peak == 0
    own = 1 + (parts.cache.page_size > 1)  # with the extra buffer, a slot to track into
    assert without.stats().slots_peak == own
    in_tree = engine.cache.evictable_size(ComponentType.RECURRENT)
    assert max(in_tree, own) <= engine.stats().slots_peak <= in_tree + own
