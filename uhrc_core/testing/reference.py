"""ReferenceCache: what a FULL prefix cache must hold, as a dict of prefixes. Slow and plain.

It stores every page-long prefix by itself, so there are no edges and no splits to get wrong. It
does not choose eviction victims; it judges a choice (`judge_eviction`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from uhrc_core.cache.audit import Audited
from uhrc_core.cache.key import Namespace, RadixKey
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType

#: A whole number of pages of tokens from the root, as bytes, in its namespace.
Prefix = tuple[Namespace, bytes]


@dataclass(slots=True)
class _Page:
    indices: list[int]
    last_access_time: int
    lock_ref: int = 0


class ReferenceCache:
    """Prefix → the pool indices of its last page, when it was last used, how often it is locked."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Prefix, _Page] = {}
        self._now = 0

    def prefixes(self, key: RadixKey, seqlen: int | None = None) -> Iterator[Prefix]:
        """The whole-page prefixes of ``key[:seqlen]``, shortest first."""
        stop = len(key) if seqlen is None else seqlen
        for end in range(self.page_size, stop + 1, self.page_size):
            yield (key.namespace, key.slice(0, end).data)

    def peek(self, key: RadixKey) -> int:
        """Hit length in tokens."""
        hit = 0
        for prefix in self.prefixes(key):
            if prefix not in self.pages:
                break
            hit += self.page_size
        return hit

    def match(self, key: RadixKey) -> list[int]:
        """The hit's pool indices; marks it as used."""
        hit = self.peek(key)
        self._touch(key, hit)
        return [i for prefix in self.prefixes(key, hit) for i in self.pages[prefix].indices]

    def insert(self, key: RadixKey, value: IndexArray) -> int:
        """Adds what is missing; returns the length that was there."""
        had = self.peek(key)
        for prefix in list(self.prefixes(key))[had // self.page_size :]:
            end = len(prefix[1]) // 4
            self.pages[prefix] = _Page(value[end - self.page_size : end].tolist(), 0)
        self._touch(key, len(key))
        return had

    def lock(self, key: RadixKey, seqlen: int, delta: int) -> None:
        """Add ``delta`` locks to the first ``seqlen`` tokens."""
        for prefix in self.prefixes(key, seqlen):
            self.pages[prefix].lock_ref += delta

    def judge_eviction(self, left: dict[Prefix, list[int]], wanted: int, freed: int) -> None:
        """Accept what an LRU eviction of ``wanted`` tokens left behind, or raise AssertionError."""
        gone = {prefix: page for prefix, page in self.pages.items() if prefix not in left}
        assert freed == len(gone) * self.page_size, "freed is not what disappeared"
        assert not any(page.lock_ref for page in gone.values()), "a locked prefix was evicted"
        for prefix in gone:
            del self.pages[prefix]
        evictable = [p.last_access_time for p in self._evictable_leaves()]
        if freed < wanted:
            assert not evictable, "eviction stopped short although something was evictable"
        if gone and evictable:
            newest = max(page.last_access_time for page in gone.values())
            assert newest <= min(evictable), "a more recent prefix went before an older one"

    def evictable_tokens(self, dp_rank: int) -> int:
        return self.page_size * sum(
            page.lock_ref == 0 for (space, _), page in self.pages.items() if space[1] == dp_rank
        )

    def expected(self) -> dict[Prefix, list[int]]:
        """Every prefix with the indices of its last page; compare with `contents`."""
        return {prefix: page.indices for prefix, page in self.pages.items()}

    def _touch(self, key: RadixKey, seqlen: int) -> None:
        self._now += 1
        for prefix in self.prefixes(key, seqlen):
            self.pages[prefix].last_access_time = self._now

    def _evictable_leaves(self) -> Iterator[_Page]:
        page_bytes = 4 * self.page_size
        parents = {(space, data[:-page_bytes]) for space, data in self.pages}
        for prefix, page in self.pages.items():
            if prefix not in parents and page.lock_ref == 0:
                yield page


def contents(cache: Audited) -> dict[Prefix, list[int]]:
    """Every whole-page prefix a tree holds, with the FULL indices of its last page."""
    found: dict[Prefix, list[int]] = {}
    for node in cache.nodes()[1:]:
        value = node.component_data[ComponentType.FULL].value
        assert value is not None
        data = b"".join(part.key.data for part in [*node.path_to_root()][::-1])
        for end in range(node.start + cache.page_size, node.end + 1, cache.page_size):
            page = value[end - cache.page_size - node.start : end - node.start]
            found[node.key.namespace, data[: 4 * end]] = page.tolist()
    return found
