"""Prompts that share nothing: what the tree costs a whole engine that gets nothing from it.

python -m pytest benchmarks/engine_no_reuse.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from uhrc_core.config.loading import load_config
from uhrc_engine import Engine, Request
from uhrc_engine.assembly import build_parts
from uhrc_engine.config import EngineTable
from uhrc_engine.weights import load_model

CONFIGS = Path(__file__).parents[1] / "configs"
ROUNDS = 5
CheckRatio = Callable[[str, float, float], None]


@pytest.mark.parametrize("name", ["kda", "swa"])
def test_the_tree_costs_nothing_where_nothing_is_shared(name: str, ratios: CheckRatio) -> None:
    """CPU seconds of alternating runs on the same compiled steps; evictions begin in the second."""
    config = load_config(CONFIGS / f"{name}.toml", ["components.full.num_tokens=4096"])
    path = config.table(EngineTable).model
    assert isinstance(path, Path)
    parts = build_parts(load_model(path, config.table(EngineTable)), config)
    engines = {"tree": Engine(parts), "none": Engine(parts.without_reuse())}
    engines["tree"].warmup()
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {label: [] for label in engines}
    for _ in range(ROUNDS):
        prompts = rng.integers(0, 1000, (4, 700))
        for label, engine in engines.items():
            start = time.process_time()
            done = engine.generate([Request(prompt, 64) for prompt in prompts])
            times[label].append(time.process_time() - start)
            assert not any(one.cached_tokens for one in done)
    assert engines["tree"].stats().cache.evicted.num_tokens_evicted
    label = f"{name}: run without reuse, tree / no sharing"
    ratios(label, min(times["tree"]) / min(times["none"]), 1.15)
