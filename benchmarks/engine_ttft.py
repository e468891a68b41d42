"""Time to first token with a hit, against what the uncached tokens should cost.

python -m pytest benchmarks/engine_ttft.py

A hit may cost at most 1.2 x (uncached tokens, rounded up to a step's bucket / prompt tokens) x the
time without a hit, and one decode step. Times are the least of several runs: other work on the
machine only ever adds to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from uhrc_core.config.loading import load_config
from uhrc_engine import Engine, Request
from uhrc_engine.config import EngineTable
from uhrc_engine.weights.smollm2 import fetch_smollm2

CONFIGS = Path(__file__).parents[1] / "configs"
ROUNDS = 4
ALLOWANCE = 1.2
CheckRatio = Callable[[str, float, float], None]


@pytest.fixture(scope="module", params=["smollm2", "kda", "gdn", "gla", "swa"])
def served(request: pytest.FixtureRequest) -> tuple[str, Engine]:
    """A warm engine of one of the shipped configs."""
    name = request.param
    config = load_config(CONFIGS / f"{name}.toml")
    path = fetch_smollm2() if name == "smollm2" else config.table(EngineTable).model
    engine = Engine.from_pretrained(path, config)
    engine.warmup()
    engine.generate([_request(np.arange(300), 2)])
    return name, engine


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens"), [(512, 496), (512, 448), (1024, 1008), (1024, 768)]
)
def test_ttft_with_a_hit_is_that_of_the_uncached_tokens(
    served: tuple[str, Engine], ratios: CheckRatio, prompt_tokens: int, cached_tokens: int
) -> None:
    """A hybrid hits at its track boundaries, every 256 tokens; windows at their pages of 64."""
    name, engine = served
    buckets = (64, 256) if name == "smollm2" else (256,)
    cached_tokens -= cached_tokens % {"smollm2": 1, "swa": 64}.get(name, 256)
    prompts = _prompts(prompt_tokens)
    cold: list[float] = []
    warm: list[float] = []
    decode: list[float] = []
    for _ in range(ROUNDS):
        engine.cache.reset()
        prompt = next(prompts)
        [first] = engine.generate([_request(prompt, 5)])
        cold.append(first.ttft_s or 0.0)
        decode.append((first.latency_s - cold[-1]) / 4)
        engine.cache.reset()
        engine.generate([_request(prompt[:cached_tokens], 2)])
        [second] = engine.generate([_request(prompt, 1)])
        assert second.cached_tokens == cached_tokens
        warm.append(second.ttft_s or 0.0)
    uncached = prompt_tokens - cached_tokens
    rounded = next(bucket for bucket in buckets if bucket >= uncached)
    bound = ALLOWANCE * rounded / prompt_tokens * min(cold) + min(decode)
    label = f"{name}: TTFT of {prompt_tokens}, {cached_tokens} cached ({min(warm) * 1e3:.0f} ms)"
    ratios(f"{label} / allowance", min(warm) / bound, 1.0)


def _prompts(length: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, 1_000, length)


def _request(token_ids: np.ndarray, max_new_tokens: int) -> Request:
    return Request(token_ids, max_new_tokens)
