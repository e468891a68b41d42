"""A scheduler and a cache on a fake device that remembers which token went to which index."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import numpy as np

from uhrc_core.eviction import LRU
from uhrc_core.pools import PagedTokenToKVPoolAllocator
from uhrc_core.tree import UnifiedRadixCache
from uhrc_engine.batch import Batch, BatchRow, StepKind
from uhrc_engine.request import LiveRequest, Request
from uhrc_engine.scheduler import Scheduler, SchedulerLimits
from uhrc_full.component import FullComponent

VOCAB = 50


def next_token(sequence: Sequence[int]) -> int:
    """The fake model: a token that depends on every token before it."""
    return zlib.crc32(np.array(sequence, np.int32).tobytes()) % VOCAB


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


class Sim:
    """A scheduler, a cache, and a device that remembers which token was written at which index."""

    def __init__(
        self, num_tokens: int = 256, page_size: int = 4, max_requests: int = 16, **limits: int
    ) -> None:
        pool = PagedTokenToKVPoolAllocator(num_tokens, page_size, 1)
        self.cache = UnifiedRadixCache(
            [FullComponent(pool, LRU(), eviction_priority=2)],
            page_size=page_size,
            max_requests=max_requests,
            max_context_len=1024,
        )
        limits = {"chunk_size": 8, "max_running": 4, "headroom_tokens": 4} | limits
        self.scheduler = Scheduler(self.cache, SchedulerLimits(**limits))
        self.written: dict[int, int] = {}
        self.batches: list[Batch] = []
        self.done: dict[str, LiveRequest] = {}

    def add(self, rid: str, prompt: Sequence[int], max_new_tokens: int, **fields: object) -> None:
        request = Request(list(prompt), max_new_tokens, **fields)  # type: ignore[arg-type]
        self.scheduler.add(LiveRequest(request, rid))

    def step(self) -> Batch | None:
        """One step; what the device reads back must be the request's own tokens."""
        batch = self.scheduler.next_batch()
        self.cache.check_invariants()
        if batch is not None:
            self.batches.append(batch)
            tokens = [self._forward(row) for row in batch.rows]
            self.scheduler.dispatched(batch)
            self.cache.check_invariants()
            self.scheduler.commit(batch, tokens)
            self.cache.check_invariants()
        self.done |= {req.rid: req for req in self.scheduler.take_finished()}
        return batch

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "requests are left after max_steps"
        assert not self.cache.live_requests()

    def _forward(self, row: BatchRow) -> int:
        for position, token in zip(range(row.start, row.stop), row.token_ids, strict=True):
            self.written[int(row.kv_indices[position])] = token
        sequence = [self.written[int(index)] for index in row.kv_indices]
        assert sequence == row.request.token_ids[: row.stop], "another sequence's KV was read"
        return next_token(sequence)

    def output(self, rid: str) -> list[int]:
        return self.done[rid].output

    def rows_of(self, rid: str) -> list[tuple[StepKind, int, int]]:
        return [
            (batch.kind, row.start, row.stop)
            for batch in self.batches
            for row in batch.rows
            if row.request.rid == rid
        ]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)
