"""The engine with a tiny random Llama: exactness, reuse, no recompilation, bad requests."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.tiny_checkpoint import VOCAB
from uhrc_core.errors import ConfigError, RequestTooLargeError
from uhrc_engine import (
    Completion,
    Engine,
    EngineBusyError,
    FinishReason,
    InvalidRequestError,
    Request,
)
from uhrc_engine.assembly import EngineParts, as_config, build_parts
from uhrc_engine.weights import Pretrained, load_pretrained

PAGE, CHUNK = 16, 128


def tables(**cache: Any) -> dict[str, Any]:
    defaults = {"enable_unified_radix_tree": True, "page_size": PAGE, "max_context_len": 1024}
    return {
        "cache": defaults | {"max_requests": 4} | cache,
        "components": {"full": {"num_tokens": 4096}},
        "scheduler": {"chunked_prefill_size": CHUNK},
        "engine": {"decode_rows": [4]},
    }


@pytest.fixture(scope="module")
def pretrained(tiny_checkpoint: Path) -> Pretrained:
    return load_pretrained(tiny_checkpoint)


@pytest.fixture(scope="module")
def parts(pretrained: Pretrained) -> EngineParts:
    """One set of compiled steps for all tests; each test takes an engine with a fresh cache."""
    parts = build_parts(pretrained, as_config(tables()))
    Engine(parts).warmup()
    return parts


@pytest.fixture
def engine(parts: EngineParts) -> Engine:
    parts.cache.reset()
    return Engine(parts)


@pytest.fixture(scope="module")
def uncached(pretrained: Pretrained) -> Engine:
    """Shares nothing, on pools of its own."""
    return Engine(build_parts(pretrained, as_config(tables())).without_reuse())


def tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def one(engine: Engine, prompt: list[int], count: int = 1, **fields: Any) -> Completion:
    [completion] = engine.generate([Request(prompt, count, **fields)])
    engine.cache.check_invariants()
    return completion


# -- exactness and reuse -------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 300])
def test_the_same_prompt_again_hits_and_gives_the_same_bits(
    engine: Engine, uncached: Engine, length: int
) -> None:
    cold = one(uncached, tokens(length), 8)
    runs = [one(engine, tokens(length), 8) for _ in range(3)]
    hit = (length - 1) // PAGE * PAGE
    assert [run.cached_tokens for run in runs] == [0, hit, hit]
    assert cold.cached_tokens == 0
    for run in runs:
        assert np.array_equal(run.first_logits, cold.first_logits)
        assert run.token_ids == cold.token_ids


@pytest.mark.parametrize("shared", [PAGE, 5 * PAGE, CHUNK, CHUNK + 3 * PAGE])
@pytest.mark.parametrize("own", [1, 40, 150])
def test_a_shared_prefix_gives_the_same_bits(
    engine: Engine, uncached: Engine, shared: int, own: int
) -> None:
    one(engine, tokens(shared) + tokens(own, seed=1))
    warm = one(engine, tokens(shared) + tokens(own, seed=2), 4)
    cold = one(uncached, tokens(shared) + tokens(own, seed=2), 4)
    assert warm.cached_tokens >= shared // PAGE * PAGE
    assert np.array_equal(warm.first_logits, cold.first_logits)
    assert warm.token_ids == cold.token_ids


def test_bits_do_not_depend_on_what_else_is_in_the_batch(engine: Engine, uncached: Engine) -> None:
    prompts = [tokens(n, seed=n) for n in (5, 70, 130, 260)]
    alone = [one(uncached, prompt, 10) for prompt in prompts]
    together = engine.generate([Request(prompt, 10) for prompt in prompts])
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids == b.token_ids
        assert np.array_equal(a.first_logits, b.first_logits)


def test_a_turn_after_decoded_tokens_hits_them_and_answers_the_same(
    engine: Engine, uncached: Engine
) -> None:
    prompt = tokens(100)
    for turn in range(3):
        warm, cold = one(engine, prompt, 40), one(uncached, prompt, 40)
        assert warm.token_ids == cold.token_ids
        assert np.abs(warm.first_logits - cold.first_logits).max() <= 1e-4
        if turn:
            # All of the turn before but the last token it generated, in whole pages.
            assert warm.cached_tokens == (len(prompt) - 30 - 1) // PAGE * PAGE
        prompt = prompt + warm.token_ids + tokens(30, seed=turn)


def test_retraction_keeps_the_text(pretrained: Pretrained, uncached: Engine) -> None:
    small = tables() | {"components": {"full": {"num_tokens": 256}}}
    small["cache"]["max_context_len"] = 256
    small["engine"] |= {"headroom_tokens": 1}
    engine = Engine.from_model(pretrained, small)
    requests = [Request(tokens(40, seed=i), 60) for i in range(4)]
    completions = engine.generate(requests)
    assert sum(completion.retractions for completion in completions) > 0
    assert engine.stats().retractions == sum(c.retractions for c in completions)
    engine.cache.check_invariants()
    for request, completion in zip(requests, completions, strict=True):
        assert completion.token_ids == one(uncached, request.token_ids, 60).token_ids


# -- sampling ------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_text_alone_and_in_a_batch(engine: Engine) -> None:
    def ask(seed: int) -> Request:
        return Request(tokens(30), 12, temperature=1.0, top_p=0.9, seed=seed)

    alone = [engine.generate([ask(seed)])[0].token_ids for seed in range(4)]
    together = [c.token_ids for c in engine.generate([ask(seed) for seed in range(4)])]
    assert alone == together
    assert len({tuple(ids) for ids in alone}) == 4


# -- API -----------------------------------------------------------------------------------------


def test_completions_come_in_the_order_of_the_requests(engine: Engine) -> None:
    requests = [Request(tokens(50, seed=i), 9 - 2 * i, rid=f"r{i}") for i in range(4)]
    completions = engine.generate(requests)
    assert [c.rid for c in completions] == ["r0", "r1", "r2", "r3"]
    assert [len(c.token_ids) for c in completions] == [9, 7, 5, 3]
    assert all(c.finish_reason is FinishReason.LENGTH for c in completions)
    for completion in completions:
        assert completion.prompt_tokens == 50
        assert completion.first_logits.shape == (VOCAB,)
        assert completion.first_logits.dtype == np.float32
        assert int(completion.first_logits.argmax()) == completion.token_ids[0]
        assert 0 < completion.ttft_s <= completion.latency_s


def test_first_logits_are_those_of_the_request_whatever_is_prefilled_beside_it(
    pretrained: Pretrained, uncached: Engine
) -> None:
    two_rows = tables()
    two_rows["engine"] |= {"prefill_rows": 2}
    engine = Engine.from_model(pretrained, two_rows)
    prompts = [tokens(n, seed=n) for n in (20, 200, 33, 90)]
    together = engine.generate([Request(prompt, 3) for prompt in prompts])
    assert engine.stats().prefill_steps < sum(-(-len(prompt) // CHUNK) for prompt in prompts)
    for prompt, completion in zip(prompts, together, strict=True):
        assert np.array_equal(completion.first_logits, one(uncached, prompt).first_logits)


def test_a_stream_gives_the_same_tokens_as_generate(engine: Engine) -> None:
    requests = [Request(tokens(20, seed=i), 5, rid=f"r{i}") for i in range(2)]
    expected = {c.rid: c.token_ids for c in engine.generate(requests)}
    streamed: dict[str, list[int]] = {"r0": [], "r1": []}
    for rid, token in engine.stream(requests):
        streamed[rid].append(token)
    assert streamed == expected


def test_a_stream_that_is_closed_aborts_its_requests(engine: Engine) -> None:
    stream = engine.stream([Request(tokens(20), 50)])
    next(stream)
    with pytest.raises(EngineBusyError):
        engine.generate([Request(tokens(5), 1)])
    stream.close()
    assert not engine.has_work
    assert engine.cache.live_requests() == ()
    assert one(engine, tokens(5)).finish_reason is FinishReason.LENGTH


def test_a_stream_that_is_never_read_does_nothing(engine: Engine) -> None:
    engine.stream([Request(tokens(20), 50)])
    assert not engine.has_work


def test_a_forward_that_fails_ends_its_requests_and_publishes_nothing(
    engine: Engine, parts: EngineParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(inputs: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(parts.runner, "step", fail)
        rid = engine.add_request(Request(tokens(100), 5))
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
    engine.cache.check_invariants()
    [completion] = engine.step().completions
    assert (completion.rid, completion.finish_reason) == (rid, FinishReason.ERROR)
    assert one(engine, tokens(100), 5).cached_tokens == 0


@pytest.mark.parametrize("requests", [1, 4, 7])
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_after_a_forward_that_failed_the_engine_is_free_again(
    engine: Engine, parts: EngineParts, monkeypatch: pytest.MonkeyPatch, call: str, requests: int
) -> None:
    """The failing step is the second: with one request it ends all, with seven some wait."""
    step, count = parts.runner.step, iter(range(1000))

    def fail_second(inputs: Any) -> jax.Array:
        if next(count) == 1:
            raise RuntimeError("device lost")
        return step(inputs)

    asked = [Request(tokens(30, seed=i), 5, rid=f"r{i}") for i in range(requests)]
    with monkeypatch.context() as patch:
        patch.setattr(parts.runner, "step", fail_second)
        with pytest.raises(RuntimeError, match="device lost"):
            list(getattr(engine, call)(asked))
    assert not engine.has_work
    assert engine.cache.live_requests() == ()
    engine.cache.check_invariants()
    assert [done.rid for done in engine.generate(asked)] == [request.rid for request in asked]
    assert len(list(engine.stream(asked))) == 5 * requests


def test_abort_between_steps_reports_what_was_generated(engine: Engine) -> None:
    rid = engine.add_request(Request(tokens(20), 50))
    for _ in range(4):
        engine.step()
    assert engine.abort(rid)
    [completion] = engine.step().completions
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids == one(engine, tokens(20), 4).token_ids
    assert not engine.abort(rid)


def test_a_stop_token_ends_the_answer(engine: Engine) -> None:
    free = one(engine, tokens(20), 10).token_ids
    stopped = one(engine, tokens(20), 10, stop_token_ids=(free[4],))
    assert stopped.token_ids == free[: free.index(free[4]) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_nothing_is_compiled_after_warmup(
    pretrained: Pretrained, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.from_model(pretrained, tables())
    jax.clear_caches()
    engine.warmup()
    before = engine.stats().compiled_programs
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        for length in (1, 2, 63, 64, 65, 128, 129, 500):
            for temperature in (0.0, 0.7):
                requests = [
                    Request(tokens(length, seed=i), 3, temperature=temperature) for i in range(5)
                ]
                engine.generate(requests)
    assert engine.stats().compiled_programs == before == 3
    assert [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()] == []


def test_stats_count_what_happened(engine: Engine) -> None:
    one(engine, tokens(200), 5)
    one(engine, tokens(200), 5)
    stats = engine.stats()
    assert (stats.output_tokens, stats.decode_steps) == (10, 8)
    assert stats.computed_tokens == 200 + 200 - 192
    assert stats.prefill_steps == 2 + 1
    assert stats.cache.hit_num_tokens == 192


# -- bad requests --------------------------------------------------------------------------------

BAD = [
    ("token_ids", []),
    ("token_ids", [[1]]),
    ("token_ids", [1.5]),
    ("token_ids", [True]),
    ("token_ids", [-1]),
    ("token_ids", [VOCAB]),
    ("token_ids", [2**31]),
    ("max_new_tokens", 0),
    ("max_new_tokens", -1),
    ("max_new_tokens", 1.0),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -1),
    ("seed", -1),
    ("seed", 2**32),
    ("priority", 0.5),
    ("stop_token_ids", ("x",)),
    ("extra_key", 1.5),
    ("rid", 7),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_request_is_named_and_changes_nothing(
    engine: Engine, field: str, value: object
) -> None:
    good = Request(tokens(20), 2)
    digest = engine.cache.digest()
    with pytest.raises(InvalidRequestError, match=field):
        engine.generate([good, replace(good, **{field: value})])
    assert not engine.has_work
    assert engine.cache.digest() == digest
    assert len(one(engine, tokens(20), 2).token_ids) == 2


def test_a_request_beyond_the_context_is_refused_with_the_sum(engine: Engine) -> None:
    with pytest.raises(RequestTooLargeError, match="1025 tokens exceeds max_context_len 1024"):
        engine.generate([Request(tokens(1000), 26)])
    assert len(one(engine, tokens(1000), 25).token_ids) == 25


def test_token_ids_may_be_any_integer_array(engine: Engine) -> None:
    expected = one(engine, tokens(40), 3).token_ids
    for dtype in (np.int32, np.uint16, np.int64):
        assert one(engine, np.array(tokens(40), dtype), 3).token_ids == expected


def test_a_config_that_does_not_suit_the_model_is_refused(pretrained: Pretrained) -> None:
    with pytest.raises(ConfigError, match=r"dp_size = 2.*\n.*max_context_len = 8192.*4096"):
        Engine.from_model(pretrained, tables(dp_size=2, max_context_len=8192))
