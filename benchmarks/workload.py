"""Prompts as chat users send them: a recorded trace where one lies beside the repository, or its
like.

The Mooncake trace (FAST '25) names each prompt's 512-token blocks by ids; equal ids mean equal
blocks behind equal prefixes. An id stands for the same random tokens wherever it occurs.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

TRACE = Path(__file__).parents[2] / "shared/data/traces/mooncake_conversation_trace.jsonl"
BLOCK, VOCAB = 512, 150_000
NUM_REQUESTS = 300
MEAN_TOKENS, MEDIAN_TOKENS, MAX_TOKENS = 14_233, 8_769, 120_633
FOLLOW_UPS = 0.07


@dataclass(frozen=True)
class Workload:
    """Prompts in order of arrival, and what to call them in a table."""

    name: str
    prompts: list[Tokens]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts))


def conversations() -> Workload:
    """The trace's first requests, 14,233 tokens on average; without the trace, generated ones."""
    if TRACE.is_file():
        with TRACE.open() as lines:
            rows = [json.loads(line) for line in islice(lines, NUM_REQUESTS)]
        return Workload(
            "Mooncake", [_expanded(row["hash_ids"], row["input_length"]) for row in rows]
        )
    return Workload("generated chats", [_expanded(*row) for row in _generated()])


def random_prompts(count: int, length: int) -> Workload:
    """``count`` prompts of ``length`` tokens that share nothing."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, (count, length)).astype(np.int32)
    return Workload(f"random {length:,}", list(tokens))


def _generated() -> list[tuple[list[int], int]]:
    """Block ids and lengths of the trace's shape: the same first block (a system prompt) in nearly
    every prompt, few that go on where an earlier one ended, and lengths with a long tail."""
    rng = random.Random(0)
    spread = math.sqrt(2 * math.log(MEAN_TOKENS / MEDIAN_TOKENS))
    draws = [rng.lognormvariate(0, spread) for _ in range(NUM_REQUESTS)]
    scale = MEAN_TOKENS * NUM_REQUESTS / sum(draws)
    rows: list[tuple[list[int], int]] = []
    next_id = 1
    for draw in draws:
        length = min(max(int(draw * scale), BLOCK), MAX_TOKENS)
        earlier = rng.choice(rows)[0][:-1] if rows and rng.random() < FOLLOW_UPS else [0]
        known = earlier[: length // BLOCK]
        count = -(-length // BLOCK) - len(known)
        rows.append(([*known, *range(next_id, next_id + count)], length))
        next_id += count
    return rows


@cache
def _block(block_id: int) -> Tokens:
    return np.random.default_rng(block_id).integers(0, VOCAB, BLOCK).astype(np.int32)


def _expanded(block_ids: list[int], length: int) -> Tokens:
    return np.concatenate([_block(block_id) for block_id in block_ids])[:length]
