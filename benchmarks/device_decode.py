"""SmolLM2-135M in float32 on CPU: this engine's steps beside transformers', measured in turns.

python -m pytest benchmarks/device_decode.py

The peer runs in an interpreter that has torch and transformers: $UHRC_PEER_PYTHON, else this one;
where neither has them the comparison is skipped. Both sides use all cores; medians count.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from uhrc_core.kinds import ComponentType
from uhrc_engine.models.contract import StepRow, make_step_inputs
from uhrc_engine.runner import Bucket, Buckets, Runner
from uhrc_engine.sampling import SamplingParams, sample
from uhrc_engine.weights import load_pretrained
from uhrc_engine.weights.smollm2 import fetch_smollm2
from uhrc_full.layout import lay_out
from uhrc_full.pool import KVPool

PAGE_SIZE, CONTEXT = 16, 1280
Measure = Callable[[dict[str, int]], dict[str, float]]
CheckRatio = Callable[[str, float, float], None]


def our_measure(path: Path) -> Measure:
    """A warm runner's timings: greedy, batch 1."""
    loaded = load_pretrained(path)
    shapes = [layer.shape for layer in loaded.model.layer_caches]
    pool = KVPool(lay_out(shapes, page_size=PAGE_SIZE, num_tokens=CONTEXT))
    buckets = Buckets(prefill=(Bucket(1, 64), Bucket(1, 256)), decode_rows=(1,))
    runner = Runner(
        loaded.model,
        loaded.params,
        {ComponentType.FULL: pool},
        buckets,
        max_pages=CONTEXT // PAGE_SIZE,
    )
    runner.warmup()
    ids = np.random.default_rng(0).integers(0, 40000, CONTEXT)
    pages = np.arange(-(-CONTEXT // PAGE_SIZE), dtype=np.int32)

    def step(tokens: np.ndarray, start: int) -> np.ndarray:
        inputs = make_step_inputs(
            [StepRow(tokens, start, {ComponentType.FULL: pages})],
            width=len(tokens),
            max_pages=runner.max_pages,
            page_size=PAGE_SIZE,
        )
        return sample(runner.step(inputs), [SamplingParams()], [0])

    def measure(case: dict[str, int]) -> dict[str, float]:
        prefix, end = case["prefix"], case["prefix"] + case["prefill"]
        for start in range(0, prefix, 256):
            step(ids[start : start + 256], start)
        begin = time.perf_counter()
        token = step(ids[prefix:end], prefix)
        middle = time.perf_counter()
        for i in range(case["decode"]):
            token = step(token, end + i)
        return {
            "prefill": middle - begin,
            "decode": (time.perf_counter() - middle) / case["decode"],
        }

    return measure


@pytest.fixture(scope="module")
def peer() -> Iterator[Measure]:
    """The same in transformers, in a process of its own."""
    python = os.environ.get("UHRC_PEER_PYTHON", sys.executable)
    probe = [python, "-c", "import torch, transformers"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no torch and transformers; set UHRC_PEER_PYTHON to one that has")
    script = Path(__file__).parent / "peers" / "transformers_decode.py"
    process = subprocess.Popen(
        [python, str(script), str(fetch_smollm2()), str(os.cpu_count())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdout.readline()

    def measure(case: dict[str, int]) -> dict[str, float]:
        assert process.stdin and process.stdout
        print(json.dumps(case), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    yield measure
    process.terminate()


@pytest.fixture(scope="module")
def ours() -> Measure:
    return our_measure(fetch_smollm2())


@pytest.mark.parametrize(("prefix", "prefill"), [(0, 64), (0, 256), (768, 256)])
def test_steps_beside_transformers(
    prefix: int, prefill: int, ours: Measure, peer: Measure, ratios: CheckRatio
) -> None:
    """Decode at batch 1 must be no slower; prefill may cost a quarter more."""
    case = {"prefix": prefix, "prefill": prefill, "decode": 16}
    rounds = [(ours(case), peer(case)) for _ in range(5)]
    for part, label, limit in (
        ("prefill", f"prefill {prefill} after {prefix}", 1.25),
        ("decode", f"decode 1 at {prefix + prefill}", 1.0),
    ):
        mine, theirs = (statistics.median(r[side][part] for r in rounds) for side in (0, 1))
        ratios(f"{label} ({mine * 1e3:.1f} ms) / transformers", mine / theirs, limit)
