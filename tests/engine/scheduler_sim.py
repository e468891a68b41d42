"""A scheduler and a cache on a fake device that remembers which sequence went to which index."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.engine.paging import token_indices
from tests.recurrent.fake_device import FakeDevice
from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.holding import StateSlots
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from uhrc_core.pools.hybrid import HybridReqToTokenPool
from uhrc_engine.batch import Batch, BatchRow, StepKind
from uhrc_engine.request import LiveRequest, Request
from uhrc_engine.scheduler import Scheduler, SchedulerLimits
from uhrc_full.component import FullComponent
from uhrc_recurrent.component import RecurrentComponent
from uhrc_recurrent.holding import TrackPlan
from uhrc_swa.component import SWAComponent
from uhrc_swa.window import WindowPlan

VOCAB = 50
MAX_CONTEXT_LEN = 1024


def next_token(sequence: Sequence[int]) -> int:
    """The fake model: a token that depends on every token before it."""
    return zlib.crc32(np.array(sequence, np.int32).tobytes()) % VOCAB


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


def marks_of(sequence: Sequence[int]) -> list[int]:
    """One number per token, of it and all before it; the last one gives `next_token`."""
    tokens = (np.int32(token).tobytes() for token in sequence)
    return list(
        itertools.accumulate(tokens, lambda mark, token: zlib.crc32(token, mark), initial=0)
    )[1:]


class Sim:
    """A scheduler, a cache, and a device that remembers at every index what was written there.

    With a `TrackPlan` the model is a hybrid, and a slot remembers the tokens its state has seen.
    With a `WindowPlan` it has layers with windows, which read no more than the window says.
    """

    def __init__(
        self,
        num_tokens: int = 256,
        page_size: int = 4,
        max_requests: int = 16,
        *,
        plan: TrackPlan | None = None,
        num_slots: int = 32,
        window: WindowPlan | None = None,
        num_window_tokens: int = 256,
        cache_class: type[BasePrefixCache] = UnifiedRadixCache,
        **limits: int,
    ) -> None:
        pool = PagedTokenToKVPoolAllocator(num_tokens, page_size, 1)
        components: list[Any] = [FullComponent(pool, LRU(), eviction_priority=2)]
        if plan is not None:
            slots = HybridReqToTokenPool(num_slots, 1)
            components.append(RecurrentComponent(slots, LRU(), 0, plan))
        self.reach = {ComponentType.FULL: MAX_CONTEXT_LEN}
        if window is not None:
            self.reach[ComponentType.SWA] = window.window_tokens
            windows = SWATokenToKVPoolAllocator(num_window_tokens, pool, window.window_tokens)
            components.append(SWAComponent(windows, LRU(), 1, window))
        self.cache = cache_class(
            components,
            page_size=page_size,
            max_requests=max_requests,
            max_context_len=MAX_CONTEXT_LEN,
        )
        limits = {"chunk_size": 8, "max_running": 4, "headroom_tokens": 4} | limits
        self.scheduler = Scheduler(self.cache, SchedulerLimits(**limits))
        self.device = FakeDevice(self.cache)
        self.written: dict[ComponentType, dict[int, int]] = {kind: {} for kind in self.reach}
        self.batches: list[Batch] = []
        self.done: dict[str, LiveRequest] = {}

    def add(self, rid: str, prompt: Sequence[int], max_new_tokens: int, **fields: object) -> None:
        request = Request(list(prompt), max_new_tokens, **fields)  # type: ignore[arg-type]
        self.scheduler.add(LiveRequest(request, rid))

    def step(self) -> Batch | None:
        """One step; what the device reads back must be the request's own tokens."""
        batch = self.scheduler.next_batch()
        self.device.check()
        if batch is not None:
            self.batches.append(_kept(batch))
            self._clone(batch)
            self._check_slots_are_distinct(batch)
            tokens = [self._forward(row) for row in batch.rows]
            self.scheduler.dispatched(batch)
            self.device.check()
            self.scheduler.commit(batch, tokens)
            self.device.check()
        self.done |= {req.rid: req for req in self.scheduler.take_finished()}
        return batch

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "requests are left after max_steps"
        assert not self.cache.live_requests()

    def _clone(self, batch: Batch) -> None:
        for source, target in batch.clones:
            self.device.slots[0, target] = self.device.slots[0, source]
        self.scheduler.cloned(batch)
        self.device.check()

    def _check_slots_are_distinct(self, batch: Batch) -> None:
        states = [row.slots for row in batch.rows if row.slots is not None]
        written = [slot for s in states for slot in (s.running, s.track) if slot is not None]
        assert len(written) == len(set(written)), "two rows write one slot"

    def _forward(self, row: BatchRow) -> int:
        marks = marks_of(row.request.token_ids[: row.stop])
        assert row.page_tables.keys() == self.reach.keys()
        for kind, pages in row.page_tables.items():
            indices = token_indices(pages, row.stop, self.cache.page_size)
            places, first = self.written[kind], max(row.start + 1 - self.reach[kind], 0)
            assert len(indices) == row.stop and min(indices[first:]) >= 0, "a token has no place"
            for position in range(row.start, row.stop):
                places[int(indices[position])] = marks[position]
            read = [places.get(int(index)) for index in indices[first:]]
            assert read == marks[first:], f"another sequence's {kind.name} KV was read"
        if row.slots is not None:
            self._advance_state(row, row.slots)
        return marks[-1] % VOCAB

    def _advance_state(self, row: BatchRow, slots: StateSlots) -> None:
        """A forward from position 0 starts from zeros, whatever the slot holds."""
        states, sequence = self.device.slots, tuple(row.request.token_ids[: row.stop])
        seen = states[0, slots.running] if row.start else ()
        assert seen == sequence[: row.start], "another sequence's state was read"
        states[0, slots.running] = sequence
        if slots.track is not None:
            states[0, slots.track] = sequence

    def output(self, rid: str) -> list[int]:
        return self.done[rid].output

    def rows_of(self, rid: str) -> list[tuple[StepKind, int, int]]:
        return [(batch.kind, row.start, row.stop) for batch, row in self._rows(rid)]

    def slots_of(self, rid: str) -> list[StateSlots | None]:
        return [row.slots for _, row in self._rows(rid)]

    def _rows(self, rid: str) -> list[tuple[Batch, BatchRow]]:
        rows = [(batch, row) for batch in self.batches for row in batch.rows]
        return [(batch, row) for batch, row in rows if row.request.rid == rid]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def play_random_traffic(sim: Sim, rng: random.Random, about: str) -> None:
    """Requests with common stems, some aborted; each must get its own text, and all must end."""
    stems = [prompt(rng.randint(1, 24), seed=i) for i in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for i in range(12):
        tokens = rng.choice(stems) + prompt(rng.randint(0, 6), seed=rng.randint(0, 3))
        asked[f"r{i}"] = tokens, rng.randint(1, 16)
        sim.add(f"r{i}", *asked[f"r{i}"], extra_key=rng.choice([None, "x"]))
        for _ in range(rng.randint(0, 4)):
            sim.step()
        if rng.random() < 0.2:
            rid = f"r{rng.randint(0, i)}"
            if sim.scheduler.abort(rid):
                aborted.add(rid)
            sim.device.check()
    sim.run()
    assert sim.cache.num_receipts() == 0
    assert sim.done.keys() == asked.keys(), about
    for rid, (tokens, count) in asked.items():
        whole = expected_output(tokens, count)
        got = sim.output(rid)
        assert got == (whole[: len(got)] if rid in aborted else whole), f"{about}, {rid}"


def _kept(batch: Batch) -> Batch:
    """With copies of the page tables, which are the cache's own."""
    rows = (
        replace(row, page_tables={kind: t.copy() for kind, t in row.page_tables.items()})
        for row in batch.rows
    )
    return replace(batch, rows=tuple(rows))
