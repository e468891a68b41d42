"""A prefix cache of hashed blocks, the usual alternative to a radix tree: what ours is measured by.

A prompt is cut into blocks of 16 tokens. The hash of a block covers its tokens and the hash of the
block before it, so that equal hashes mean equal prefixes, and one dict from hash to block is the
whole index. A block that nobody refers to stays indexed until its place is needed; the one that was
left longest ago goes first, and of one request the last block first.

The hash is Python's own, of (hash of the parent, 64 bytes of int32 tokens). It has 64 bits and is
salted anew in every process. blake2b, sha256 and md5 of the same bytes take three to five times as
long. A list is first packed into the same bytes by `struct.pack`, twice as fast as numpy or `array`
do it. So lists and arrays of the same tokens hit each other's blocks; hashing tuples of a list's
slices instead takes no less.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BLOCK = 16
_TOKENS = f"{BLOCK * 4}s"


@dataclass(slots=True)
class BlockRequest:
    """A live request: the hashes of its prompt's whole blocks, the blocks it has, how many of them
    the index knows."""

    hashes: list[int]
    blocks: list[int] = field(default_factory=list[int])
    num_published: int = 0


class BlockHashCache:
    """Life of a request: `arrive`, (`take`, forward, `publish`)*, `finish`."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.index: dict[int, int] = {}
        self.hash_of: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def arrive(self, tokens: list[int] | npt.NDArray[np.int32]) -> BlockRequest:
        """Refer to the longest known prefix of the prompt, of whole blocks, its last token left."""
        if isinstance(tokens, list):
            data = struct.pack(f"{len(tokens)}i", *tokens)
        else:
            data = tokens.astype(np.int32, copy=False).tobytes()
        whole = memoryview(data)[: len(tokens) // BLOCK * BLOCK * 4]
        parent, hashes = 0, list[int]()
        for (block,) in struct.iter_unpack(_TOKENS, whole):
            parent = hash((parent, block))
            hashes.append(parent)
        req = BlockRequest(hashes)
        for value in hashes[: (len(tokens) - 1) // BLOCK]:
            found = self.index.get(value)
            if found is None:
                break
            if not self.refs[found]:
                del self.idle[found]
            self.refs[found] += 1
            req.blocks.append(found)
        req.num_published = len(req.blocks)
        return req

    def take(self, req: BlockRequest, upto: int) -> bool:
        """Blocks for its first ``upto`` tokens; ``False``, nothing changed: too few are left."""
        need = max(-(-upto // BLOCK) - len(req.blocks), 0)
        short = need - len(self.free)
        if short > len(self.idle):
            return False
        self.evict(short)
        fresh = self.free[len(self.free) - need :]
        del self.free[len(self.free) - need :]
        for block in fresh:
            self.refs[block] = 1
        req.blocks += fresh
        return True

    def publish(self, req: BlockRequest, upto: int) -> None:
        """Index its whole blocks of the first ``upto`` tokens; one whose content is known stays
        the request's own."""
        done, stop = req.num_published, min(upto // BLOCK, len(req.hashes))
        for value, block in zip(req.hashes[done:stop], req.blocks[done:stop], strict=True):
            if self.index.setdefault(value, block) == block:
                self.hash_of[block] = value
        req.num_published = max(done, stop)

    def finish(self, req: BlockRequest) -> None:
        """Let go of all its blocks; those that are indexed stay until their places are needed."""
        for block in reversed(req.blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                if block in self.hash_of:
                    self.idle[block] = None
                else:
                    self.free.append(block)

    def evict(self, num_blocks: int) -> None:
        """Free that many blocks nobody refers to, or all there are."""
        for _ in range(min(num_blocks, len(self.idle))):
            block, _ = self.idle.popitem(last=False)
            del self.index[self.hash_of.pop(block)]
            self.free.append(block)
