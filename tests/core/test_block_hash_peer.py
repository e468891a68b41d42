"""The block-hash cache that ours is measured by is itself right: what it hits, what it keeps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.peers.block_hash import BLOCK, BlockHashCache, BlockRequest

VOCAB = 3


def prompt_of(stems: list[list[int]], rng: random.Random) -> list[int]:
    """A cut stem and a tail of its own, so that prompts share prefixes of every length."""
    stem = rng.choice(stems)
    return stem[: rng.randint(0, len(stem))] + rng.choices(range(VOCAB), k=rng.randint(1, 60))


def naive_hit_blocks(prompt: list[int], published: list[list[int]]) -> int:
    """Whole blocks that the prompt, its last token left, has in common with any published one."""
    most = 0
    for other in published:
        same = 0
        while same < min(len(prompt) - 1, len(other)) and prompt[same] == other[same]:
            same += 1
        most = max(most, same // BLOCK)
    return most


def check_blocks(cache: BlockHashCache, live: list[list[int]], num_blocks: int) -> None:
    """Every block is free, idle or referred to, and counted as often as it is referred to."""
    refs = [sum(blocks.count(block) for blocks in live) for block in range(num_blocks)]
    assert cache.refs == refs
    held = {block for block, count in enumerate(refs) if count}
    assert sorted([*cache.free, *cache.idle, *held]) == list(range(num_blocks))
    assert {block: value for value, block in cache.index.items()} == cache.hash_of
    assert cache.idle.keys() <= cache.hash_of.keys()


@pytest.mark.parametrize("seed", range(5))
def test_hits_are_those_of_a_naive_search(seed: int) -> None:
    """Lists and arrays in turns, chunks of any length; nothing is evicted."""
    rng = random.Random(seed)
    stems = [rng.choices(range(VOCAB), k=200) for _ in range(3)]
    cache = BlockHashCache(4000)
    published: list[list[int]] = []
    for number in range(100):
        prompt = prompt_of(stems, rng)
        req = cache.arrive(np.array(prompt, np.int32) if number % 2 else prompt)
        assert len(req.blocks) == naive_hit_blocks(prompt, published), f"seed {seed}"
        upto = len(req.blocks) * BLOCK
        while upto < len(prompt):
            upto = min(upto + rng.randint(1, 50), len(prompt))
            assert cache.take(req, upto)
            cache.publish(req, upto)
        cache.finish(req)
        published.append(prompt)
        check_blocks(cache, [], 4000)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_live_requests_keep_their_content(seed: int) -> None:
    """Many requests at once in a pool that is too small: a hit is never on a block that was
    written anew, and no block is lost or has two owners."""
    rng = random.Random(seed)
    stems = [rng.choices(range(VOCAB), k=100) for _ in range(3)]
    num_blocks = 24
    cache = BlockHashCache(num_blocks)
    content: dict[int, list[int]] = {}
    live: list[BlockRequest] = []
    hits = refused = 0
    for _ in range(300):
        prompt = prompt_of(stems, rng)
        req = cache.arrive(prompt)
        hit = len(req.blocks)
        hits += hit
        for number, block in enumerate(req.blocks):
            assert content[block] == prompt[: (number + 1) * BLOCK], f"seed {seed}"
        if cache.take(req, len(prompt)):
            assert len(req.blocks) == -(-len(prompt) // BLOCK)
            for number, block in enumerate(req.blocks[hit:], hit):
                content[block] = prompt[: (number + 1) * BLOCK]
            cache.publish(req, len(prompt))
        else:
            refused += 1
        live.append(req)
        check_blocks(cache, [each.blocks for each in live], num_blocks)
        while live and (len(live) > 3 or rng.random() < 0.3):
            cache.finish(live.pop(rng.randrange(len(live))))
    assert hits > 100 and refused > 0, "the test's pool is too large or too small"


def test_the_block_left_longest_ago_goes_first_and_of_one_request_the_last() -> None:
    cache = BlockHashCache(4)
    for first in (1, 2):
        req = cache.arrive([first] * (2 * BLOCK))
        assert cache.take(req, 2 * BLOCK)
        cache.publish(req, 2 * BLOCK)
        cache.finish(req)
    cache.evict(1)
    found = [cache.arrive([first] * (2 * BLOCK + 1)).blocks for first in (1, 2)]
    assert [len(blocks) for blocks in found] == [1, 2]
    assert not cache.take(cache.arrive([3]), 2 * BLOCK), "one block is free, all others are in use"
