"""What the scheduler and the making of a step's arrays cost beside a decode step on the device.

python -m pytest benchmarks/engine_scheduler.py

No model runs: every request gets the same next token. Times are CPU seconds a step, the mean over
one page's worth of steps, so that every request takes one page in it; the least of several rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.pools import PagedTokenToKVPoolAllocator
from uhrc_engine.batch import Batch, BatchRow, StepKind
from uhrc_engine.models.contract import StepRow, make_step_inputs
from uhrc_engine.request import LiveRequest, Request
from uhrc_engine.scheduler import Scheduler, SchedulerLimits
from uhrc_full.component import FullComponent

CheckRatio = Callable[[str, float, float], None]

PAGE, ROWS = 128, 64
SHORT, LONG = 2_048, 32_768
ROUNDS = 5
MAX_NEW_TOKENS = (ROUNDS + 2) * PAGE
MAX_CONTEXT_LEN = LONG + MAX_NEW_TOKENS
TOKENS = [7] * ROWS


def decoding_scheduler(context: int) -> Scheduler:
    """`ROWS` requests past their prompts of ``context`` tokens, which share nothing."""
    num_tokens = ROWS * (context + MAX_NEW_TOKENS + 2 * PAGE)
    pool = PagedTokenToKVPoolAllocator(num_tokens, PAGE, 1)
    cache = UnifiedRadixCache(
        [FullComponent(pool, LRU(), eviction_priority=2)],
        page_size=PAGE,
        max_requests=ROWS,
        max_context_len=MAX_CONTEXT_LEN,
    )
    limits = SchedulerLimits(chunk_size=context, prefill_rows=1, max_running=ROWS)
    scheduler = Scheduler(cache, limits)
    prompts = np.random.default_rng(0).integers(0, 150_000, (ROWS, context))
    for number, prompt in enumerate(prompts):
        scheduler.add(LiveRequest(Request(prompt.tolist(), MAX_NEW_TOKENS), str(number)))
    while scheduler.waiting or any(not req.decoding for req in scheduler.running):
        step(scheduler)
    assert len(scheduler.running) == ROWS and not scheduler.num_retractions
    return scheduler


def step(scheduler: Scheduler, use: Callable[[Batch], object] | None = None) -> Batch:
    """One step as the engine makes it; ``use`` stands where its forward is dispatched."""
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.cloned(batch)
    if use is not None:
        use(batch)
    scheduler.dispatched(batch)
    scheduler.commit(batch, TOKENS[: len(batch.rows)])
    return batch


def make_inputs(batch: Batch) -> None:
    """The arrays that a model with full attention alone is given."""
    make_step_inputs(
        [_step_row(row) for row in batch.rows],
        width=1,
        max_pages=-(-MAX_CONTEXT_LEN // PAGE),
        page_size=PAGE,
    )


def _step_row(row: BatchRow) -> StepRow:
    return StepRow(row.token_ids, row.start, row.page_tables)


@dataclass(frozen=True)
class StepTimes:
    """Least CPU seconds of a decode step at one context length: the scheduler's share, and that of
    `make_step_inputs`."""

    scheduler_s: float
    inputs_s: float


def step_times(context: int) -> StepTimes:
    scheduler = decoding_scheduler(context)
    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        inputs: list[float] = []
        start = time.process_time()
        for _ in range(PAGE):
            batch = step(
                scheduler, lambda batch, inputs=inputs: inputs.append(cpu_s(make_inputs, batch))
            )
            assert batch.kind is StepKind.DECODE and len(batch.rows) == ROWS
        total = time.process_time() - start
        rounds.append(((total - sum(inputs)) / PAGE, sum(inputs) / PAGE))
    assert scheduler.running[0].token_ids[-ROUNDS * PAGE :] == [7] * (ROUNDS * PAGE)
    return StepTimes(*(min(column) for column in zip(*rounds, strict=True)))


def cpu_s(call: Callable[[Batch], object], batch: Batch) -> float:
    start = time.process_time()
    call(batch)
    return time.process_time() - start


class Counter:
    """Something with a method, for the floor."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> None:
        self.count += number


def floor_s() -> float:
    """A step's floor: for each request ten method calls and one number written into an array."""
    counters, written = [Counter() for _ in range(ROWS)], np.zeros((ROWS, 1), np.int32)
    best = math.inf
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(PAGE):
            for row, counter in enumerate(counters):
                for number in range(10):
                    counter.add(number)
                written[row, 0] = row
        best = min(best, (time.process_time() - start) / PAGE)
    return best


@pytest.fixture(scope="module")
def times() -> dict[int, StepTimes]:
    return {context: step_times(context) for context in (SHORT, LONG)}


@pytest.fixture(scope="module")
def floor() -> float:
    return floor_s()


def test_scheduling_a_decode_step(
    times: dict[int, StepTimes], floor: float, ratios: CheckRatio
) -> None:
    """The limit is about 1 ms."""
    mine = times[LONG].scheduler_s
    label = f"schedule a decode step, {ROWS} requests of {LONG:,} tokens ({mine * 1e3:.2f} ms)"
    ratios(f"{label} / 640 calls + 64 writes ({floor * 1e6:.0f} µs)", mine / floor, 18.0)


def test_making_the_inputs_of_a_decode_step(
    times: dict[int, StepTimes], floor: float, ratios: CheckRatio
) -> None:
    mine = times[LONG].inputs_s
    label = f"make_step_inputs of it ({mine * 1e3:.2f} ms)"
    ratios(f"{label} / 640 calls + 64 writes ({floor * 1e6:.0f} µs)", mine / floor, math.inf)


@pytest.mark.parametrize("part", ["scheduler", "inputs"])
def test_a_decode_step_does_not_feel_the_context(
    part: str, times: dict[int, StepTimes], ratios: CheckRatio
) -> None:
    long, short = (getattr(times[context], f"{part}_s") for context in (LONG, SHORT))
    name = {"scheduler": "schedule a decode step", "inputs": "make_step_inputs of it"}[part]
    ratios(f"{name}: context {LONG:,} / {SHORT:,} ({short * 1e3:.2f} ms)", long / short, 1.5)
