"""SmolLM2-135M in float32 on CPU: this engine's steps beside transformers', measured in turns.

    python benchmarks/device_decode.py [--peer-python PATH]

PATH is an interpreter with torch and transformers (default: this one). Without them a line says so
and only our figures are printed. Both sides use all cores; the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from uhrc_engine.models.contract import StepRow, make_step_inputs
from uhrc_engine.runner import Bucket, Buckets, Runner
from uhrc_engine.sampling import SamplingParams, sample
from uhrc_engine.weights import load_pretrained
from uhrc_engine.weights.smollm2 import fetch_smollm2
from uhrc_full.layout import plan_pool
from uhrc_full.pool import FullKVPool

PAGE_SIZE, CONTEXT = 16, 1280
CASES = (
    {"prefix": 0, "prefill": 64, "decode": 16},
    {"prefix": 0, "prefill": 256, "decode": 16},
    {"prefix": 768, "prefill": 256, "decode": 16},
)
Measure = Callable[[dict[str, int]], dict[str, float]]


def our_measure(path: Path) -> Measure:
    """A warm runner's timings: greedy, batch 1."""
    loaded = load_pretrained(path)
    shapes = [layer.shape for layer in loaded.model.layer_caches]
    pool = FullKVPool(plan_pool(shapes, page_size=PAGE_SIZE, num_tokens=CONTEXT))
    buckets = Buckets(prefill=(Bucket(1, 64), Bucket(1, 256)), decode_rows=(1,))
    runner = Runner(
        loaded.model, loaded.params, {"full": pool}, buckets, max_pages=CONTEXT // PAGE_SIZE
    )
    runner.warmup()
    ids = np.random.default_rng(0).integers(0, 40000, CONTEXT)
    kv = np.arange(CONTEXT, dtype=np.int32)

    def step(tokens: np.ndarray, start: int) -> np.ndarray:
        inputs = make_step_inputs(
            [StepRow(tokens, start, kv)],
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


def peer_measure(python: str, path: Path) -> Measure | None:
    """The same in transformers, in a process of its own; None (said on stdout) without torch."""
    probe = [python, "-c", "import torch, transformers"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        print(f"SKIPPED the comparison: {python} has no torch and transformers (--peer-python)")
        return None
    script = Path(__file__).with_name("device_peer.py")
    peer = subprocess.Popen(
        [python, str(script), str(path), str(os.cpu_count())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert peer.stdin and peer.stdout
    peer.stdout.readline()

    def measure(case: dict[str, int]) -> dict[str, float]:
        assert peer.stdin and peer.stdout
        print(json.dumps(case), file=peer.stdin, flush=True)
        return json.loads(peer.stdout.readline())

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    path = fetch_smollm2()
    ours, peer = our_measure(path), peer_measure(options.peer_python, path)
    print(f"{'step':32} {'ours ms':>9} {'peer ms':>9} {'ours/peer':>10}")
    for case in CASES:
        rounds = [(ours(case), peer(case) if peer else None) for _ in range(options.rounds)]
        context = case["prefix"] + case["prefill"]
        for part, label in (
            ("prefill", f"prefill {case['prefill']} after {case['prefix']}"),
            ("decode", f"decode 1 at {context}"),
        ):
            mine = statistics.median(a[part] for a, _ in rounds) * 1e3
            theirs = statistics.median(b[part] for _, b in rounds if b) * 1e3 if peer else None
            right = f"{theirs:9.1f} {mine / theirs:10.2f}" if theirs else f"{'-':>9} {'-':>10}"
            print(f"{label:32} {mine:9.1f} {right}")


if __name__ == "__main__":
    main()
