"""The walk down the tree: every validator sees every node, whatever the others said."""

from __future__ import annotations

from typing import Any

from tests.support import full_cache, insert
from uhrc_core.cache.component import MatchValidator
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.walk import TreeWalker


class Scripted:
    """Refuses at the depths it is told, and lists where it was asked."""

    miss_reason = "scripted"

    def __init__(self, refuses: set[int]) -> None:
        self.refuses = refuses
        self.asked: list[tuple[int, int]] = []

    def match_validator(self) -> MatchValidator:
        def accepts(node: UnifiedTreeNode, num_tokens: int) -> bool:
            self.asked.append((node.end, num_tokens))
            return node.end not in self.refuses

        return accepts


def walk(refused_by_first: set[int], refused_by_second: set[int]) -> Any:
    cache = full_cache(16)
    for stop in (2, 4, 6):
        insert(cache, list(range(stop)))
    first, second = Scripted(refused_by_first), Scripted(refused_by_second)
    components: Any = (first, second)
    walker = TreeWalker(cache.nodes()[0], components, 1)
    found = walker.walk(RadixKey(list(range(5))))
    assert first.asked == second.asked == [(2, 2), (4, 2), (6, 1)]
    return found


def test_a_refusal_ends_neither_the_walk_nor_the_asking() -> None:
    assert (walk({2}, {2}).best_len, walk({2}, set()).best_len) == (5, 5)
    assert walk({4, 6}, {2}).best_len == 0
    assert walk({6}, {2}).best_len == 4
    assert walk(set(), set()).miss_reason is None
