"""DP routing: which rank a request goes to. A request's rank is fixed from then on.

Each policy is a choice over `RankLoad` records; `DpRouter` runs one round of choices and counts
what it has routed, so that the requests of one round do not all go to the rank that was emptiest
when it began. When every rank is full the request is deferred.

`cache_aware` decides in this order (``load`` is running plus pending requests):

1. Loads far apart, ``max - min > 32 and max > 1.1 * min``: the least loaded rank.
2. Ranks whose cached prefix covers more than half of the prompt without its last token (which must
   be computed anyway): the least loaded of them.
3. Else by shape: the least prefill and decode work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from uhrc_core.cache.key import RadixKey

#: Tokens of the key that a rank has cached, changing nothing: `BasePrefixCache.peek_prefix_len`.
PrefixProbe = Callable[[RadixKey], int]

_IMBALANCE_ABS = 32
_IMBALANCE_REL_PERCENT = 110


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one dp rank has to do.

    Attributes:
        running: requests admitted and not finished.
        pending: requests routed to the rank and not admitted.
        prefill_tokens: prompt tokens still to be computed, of both.
        decode_tokens: tokens that the running requests hold, which each decode step reads.
        max_requests: most requests, running and pending, that the rank takes.
    """

    running: int
    pending: int
    prefill_tokens: int
    decode_tokens: int
    max_requests: int

    @property
    def num_requests(self) -> int:
        return self.running + self.pending

    @property
    def has_room(self) -> bool:
        return self.num_requests < self.max_requests

    def with_pending(self, prefill_tokens: int) -> RankLoad:
        """The load after one more request with so many tokens to compute was routed here."""
        return replace(
            self, pending=self.pending + 1, prefill_tokens=self.prefill_tokens + prefill_tokens
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What there is to choose from for one request.

    Attributes:
        key: the whole prompt; its dp_rank does not matter.
        loads: of every rank.
        open_ranks: those with room, ascending, at least one.
        probe: may be asked for the prompt on any rank.
    """

    key: RadixKey
    loads: Sequence[RankLoad]
    open_ranks: Sequence[int]
    probe: PrefixProbe

    def hit_len(self, rank: int) -> int:
        """Tokens of the prompt, its last one apart, that ``rank`` has cached in its namespace."""
        if len(self.key) < 2:
            return 0
        extra_key = self.key.namespace[0]
        return self.probe(RadixKey(self.key.tokens[:-1], extra_key, rank))


class RoutingPolicy(ABC):
    """Chooses among the ranks with room. Ties go to the lowest rank, so every host agrees."""

    @abstractmethod
    def choose(self, choice: Choice) -> int:
        """One of the open ranks."""


class MinRunningQueue(RoutingPolicy):
    """The rank with the fewest requests."""

    def choose(self, choice: Choice) -> int:
        return min(choice.open_ranks, key=lambda rank: choice.loads[rank].num_requests)


class RoundRobin(RoutingPolicy):
    """One rank after the other; a full one is skipped. Remembers its place between rounds."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, choice: Choice) -> int:
        num_ranks = len(choice.loads)
        self._last = min(choice.open_ranks, key=lambda rank: (rank - self._last - 1) % num_ranks)
        return self._last


class ShapeAware(RoutingPolicy):
    """The rank with the fewest tokens in work: to prefill and held for decode; then requests."""

    def choose(self, choice: Choice) -> int:
        def work(rank: int) -> tuple[int, int]:
            load = choice.loads[rank]
            return load.prefill_tokens + load.decode_tokens, load.num_requests

        return min(choice.open_ranks, key=work)


class CacheAware(RoutingPolicy):
    """Where the prefix is cached, unless the ranks are out of balance (see the module)."""

    def __init__(self) -> None:
        self._least_loaded = MinRunningQueue()
        self._by_shape = ShapeAware()

    def choose(self, choice: Choice) -> int:
        counts = [load.num_requests for load in choice.loads]
        low, high = min(counts), max(counts)
        if high - low > _IMBALANCE_ABS and high * 100 > low * _IMBALANCE_REL_PERCENT:
            return self._least_loaded.choose(choice)
        reusable_len = len(choice.key) - 1
        holders = [
            rank for rank in choice.open_ranks if 2 * choice.hit_len(rank) > reusable_len > 0
        ]
        if holders:
            return self._least_loaded.choose(replace(choice, open_ranks=holders))
        return self._by_shape.choose(choice)


#: By the names of ``scheduler.dp_schedule_policy``.
ROUTING_POLICIES: Mapping[str, type[RoutingPolicy]] = {
    "min_running_queue": MinRunningQueue,
    "round_robin": RoundRobin,
    "shape_aware": ShapeAware,
    "cache_aware": CacheAware,
}


class DpRouter:
    """One round of routing: the loads as they were when it began, plus what it has routed since.

    Args:
        policy: lives longer than the round.
        loads: one per rank.
        probe: see `PrefixProbe`.
    """

    def __init__(
        self, policy: RoutingPolicy, loads: Sequence[RankLoad], probe: PrefixProbe
    ) -> None:
        self._policy = policy
        self._loads = list(loads)
        self._probe = probe

    def route(self, key: RadixKey) -> int | None:
        """The rank for a prompt, counted as pending there; ``None``: all are full, defer it."""
        open_ranks = [rank for rank, load in enumerate(self._loads) if load.has_room]
        if not open_ranks:
            return None
        choice = Choice(key, self._loads, open_ranks, self._probe)
        rank = self._policy.choose(choice)
        uncached = len(key) - choice.hit_len(rank)
        self._loads[rank] = self._loads[rank].with_pending(uncached)
        return rank
