"""Window models through the whole engine: a hit changes when tokens come, never which, and however
long a conversation grows, its window layers keep what a window holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.one_request import one, same_bits, tokens
from uhrc_core.config.loading import parse_config
from uhrc_core.errors import ConfigError
from uhrc_core.kinds import ComponentType
from uhrc_engine import Completion, Engine, Request
from uhrc_engine.assembly import EngineParts, build_parts
from uhrc_engine.weights import Pretrained, load_seeded
from uhrc_swa.window import WindowPlan

SWA = ComponentType.SWA
GPT_OSS = json.loads((Path(__file__).parents[2] / "configs/swa/config.json").read_text())
WINDOW, PAGE, CHUNK, POOL = 48, 16, 64, 640
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "sliding_window": WINDOW,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": GPT_OSS | SMALL | {"layer_types": ["sliding_attention", "full_attention"]},
    "mistral": SMALL
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "vocab_size": 1024,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
}
OWNED = WINDOW + CHUNK + 2 * PAGE
"""What a running request has of the pool, at most, beside the tree's."""
LEAST = WindowPlan(WINDOW, CHUNK, PAGE).request_tokens
"""The smallest pool: what one request owns, and has locked in the tree."""


def config(**tables: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "cache": {
            "enable_unified_radix_tree": True,
            "page_size": PAGE,
            "max_requests": 4,
            "max_context_len": 1024,
        },
        "components": {"full": {"num_tokens": 4096}, "swa": {"num_tokens": POOL}},
        "scheduler": {"chunked_prefill_size": CHUNK},
        "engine": {"prefill_widths": [CHUNK], "decode_rows": [4], "headroom_tokens": 1},
    }
    return {name: table | tables.get(name, {}) for name, table in made.items()}


@pytest.fixture(scope="module", params=list(FAMILIES))
def pretrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(FAMILIES[request.param]))
    return load_seeded(folder, seed=3)


@pytest.fixture(scope="module")
def parts(pretrained: Pretrained) -> EngineParts:
    made = build_parts(pretrained, parse_config(config()))
    Engine(made).warmup()
    return made


@pytest.fixture
def engine(parts: EngineParts) -> Engine:
    parts.cache.reset()
    return Engine(parts)


def page_floor(num_tokens: int) -> int:
    return num_tokens - num_tokens % PAGE


def owned_tokens(engine: Engine) -> int:
    """What the live requests have of the window pool beside the tree's."""
    cache = engine.cache
    in_tree = cache.evictable_size(SWA) + cache.protected_size(SWA)
    return POOL - cache.available_size(SWA) - in_tree


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Completion]:
    """All to their end, with the pool's use and the cache's invariants looked at in each step."""
    for request in requests:
        engine.add_request(request)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {completion.rid: completion for completion in engine.step().completions}
        engine.cache.check_invariants()
        assert owned_tokens(engine) <= OWNED * engine.stats().running
    return done


def test_a_model_with_windows_alone_has_an_empty_full_pool(parts: EngineParts) -> None:
    components = {cache.component for cache in parts.runner.model.layer_caches}
    assert (parts.runner.pools[ComponentType.FULL].buffers == ()) == (components == {SWA})
    assert len(parts.runner.pools[SWA].buffers) > 0


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, CHUNK, CHUNK + 1, 207, 320])
def test_the_same_prompt_three_times_gives_the_same_bits(
    parts: EngineParts, engine: Engine, length: int
) -> None:
    prompt = tokens(length, length)
    none = one(Engine(parts.without_reuse()), prompt)
    runs = [one(engine, prompt) for _ in range(3)]
    assert all(same_bits(run, none) for run in runs)
    assert [run.cached_tokens for run in runs] == [0] + [page_floor(length - 1)] * 2


def test_forks_hit_up_to_where_they_part(parts: EngineParts, engine: Engine) -> None:
    shared = tokens(200)
    prompts = [shared + tokens(100, seed) for seed in (1, 2, 3)]
    none = [one(Engine(parts.without_reuse()), prompt) for prompt in prompts]
    runs = [one(engine, prompt) for prompt in prompts]
    assert all(map(same_bits, runs, none))
    assert [run.cached_tokens for run in runs] == [0, 192, 192]


def test_fifty_turns_hit_fully_and_take_no_more_than_windows(
    parts: EngineParts, engine: Engine
) -> None:
    """Two conversations at once, which outgrow the window and the pool many times over."""
    talks = [tokens(150, seed) for seed in (1, 2)]
    before = [0, 0]
    for turn in range(50):
        for talk in talks:
            talk += tokens(7, len(talk))
        asked = [Request(talk, 6, rid=f"{turn}-{i}") for i, talk in enumerate(talks)]
        done = list(run(engine, asked).values())
        done.sort(key=lambda completion: completion.rid)
        assert [completion.cached_tokens for completion in done] == [*map(page_floor, before)]
        for talk, completion in zip(talks, done, strict=True):
            talk += completion.token_ids
        # The last token has been sampled and not been computed.
        before = [len(talk) - 1 for talk in talks]
    assert min(before) > POOL and engine.stats().retractions == 0
    assert engine.stats().cache.evicted.swa_num_tokens_evicted > POOL
    # The same answers as computed from nothing: turn 50 has all the others in its prompt.
    without = Engine(parts.without_reuse())
    for talk in talks:
        assert one(without, talk[:-6], 6).token_ids == talk[-6:]


def test_without_reuse_windows_are_left_behind_all_the_same(parts: EngineParts) -> None:
    engine = Engine(parts.without_reuse())
    run(engine, [Request(tokens(900, seed), 20) for seed in range(3)])
    assert engine.cache.available_size(SWA) == POOL


def test_what_the_pool_has_freed_is_never_read(parts: EngineParts, engine: Engine) -> None:
    """NaN lies in every free page of the window pool before each step."""
    prompts = [tokens(300, 5), tokens(140, 6)]
    prompts.append(prompts[0][:200] + tokens(30, 7))
    none = [one(Engine(parts.without_reuse()), prompt, 70).token_ids for prompt in prompts]
    pool: Any = parts.runner.pools[SWA]
    allocator: Any = engine.cache.components[1].allocator
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(prompt, 70, rid=str(i)))
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        is_free = np.zeros(POOL // PAGE, bool)
        is_free[allocator.free_pages(0)] = True

        def poison(pages: jax.Array, is_free: np.ndarray = is_free) -> jax.Array:
            return jnp.where(is_free.reshape(-1, *[1] * (pages.ndim - 1)), jnp.nan, pages)

        pool.replace(jax.tree.map(poison, pool.buffers))
        answers |= {done.rid: done.token_ids for done in engine.step().completions}
    pool.replace(jax.tree.map(jnp.nan_to_num, pool.buffers))
    assert [answers[str(i)] for i in range(3)] == none


def test_retraction_under_a_short_window_pool_changes_no_answer(
    pretrained: Pretrained, parts: EngineParts
) -> None:
    """The pool holds what one request may need, and four grow in it."""
    swa = {"full": {"num_tokens": 4096}, "swa": {"num_tokens": LEAST}}
    short = Engine(build_parts(pretrained, parse_config(config(components=swa))))
    asked = [Request(tokens(20, seed), 120, rid=str(seed)) for seed in range(4)]
    for request in asked:
        short.add_request(request)
    done: dict[str, Completion] = {}
    while short.has_work:
        done |= {completion.rid: completion for completion in short.step().completions}
        short.cache.check_invariants()
    assert short.stats().retractions > 0
    without = Engine(parts.without_reuse())
    for request in asked:
        assert done[request.rid or ""].token_ids == one(without, request.token_ids, 120).token_ids


@pytest.mark.parametrize("steps", range(7))
def test_abort_at_every_step_loses_no_page(parts: EngineParts, engine: Engine, steps: int) -> None:
    prompt = tokens(150, 8)
    expected = one(Engine(parts.without_reuse()), prompt)
    one(engine, prompt)
    rid = engine.add_request(Request(prompt + tokens(100, 4), 8))
    for _ in range(steps):
        engine.step()
        engine.cache.check_invariants()
    engine.abort(rid)
    while engine.has_work:
        engine.step()
    engine.cache.check_invariants()
    assert engine.cache.available_size(SWA) + engine.cache.evictable_size(SWA) == POOL
    assert same_bits(one(engine, prompt), expected)


def test_nothing_compiles_after_warm_up(engine: Engine) -> None:
    compiled = engine.stats().compiled_programs
    run(engine, [Request(tokens(length), 60) for length in (5, 64, 300)])
    assert engine.stats().compiled_programs == compiled


def test_layers_that_the_cache_plans_otherwise_are_refused(pretrained: Pretrained) -> None:
    plain = {key: value for key, value in pretrained.config.items() if key != "layer_types"}
    misread = replace(pretrained, config=plain | {"sliding_window": None})
    tables = config() | {"components": {"full": {"num_tokens": 4096}}}
    with pytest.raises(ConfigError, match=r"plugins plan layers \{'FULL': 2\}, the model has"):
        build_parts(misread, parse_config(tables))


def test_the_plain_radix_tree_serves_the_same_answers(
    pretrained: Pretrained, parts: EngineParts, engine: Engine
) -> None:
    """The cache that is built where the unified one is off."""
    off = parse_config(config(cache={"enable_unified_radix_tree": False}))
    made = replace(build_parts(pretrained, off), runner=parts.runner)
    talk = tokens(150, 1)
    for turn in range(4):
        talk += tokens(9, turn)
        expected = one(engine, talk, 20)
        parts.cache.reset()
        plain = Engine(made)
        assert one(plain, talk, 20).token_ids == expected.token_ids
        assert one(plain, talk, 20).cached_tokens == page_floor(len(talk) - 1)
        made.cache.reset()
        talk += expected.token_ids
