"""RandomProgram: random calls of a cache's public API, each step checked, from a seed.

    program = RandomProgram(cache, seed=7)
    program.run(100)        # raises AssertionError with seed, step, what it did and what broke
    program.end()           # gives everything back

The same seed makes the same calls on equal caches, without hypothesis or pytest.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.key import ExtraKey, RadixKey
from uhrc_core.cache.params import EvictParams, IncLockRefResult, MatchPrefixParams
from uhrc_core.errors import StaleNodeError
from uhrc_core.kinds import ComponentType
from uhrc_core.testing.paper import FORWARD_PAGES, PaperDevice, PlainRequest, positions

#: Few distinct pages, so that prefixes are shared, split and extended often.
_PAGES: tuple[int, ...] = (0, 0, 1)
_PAGES_MAX = 6
_EXTRA_KEYS: tuple[ExtraKey, ...] = (None, None, None, None, "", ("lora", "a"))
_PAGE_STRIDE = 100_000
#: Ended requests that new ones may go on from.
_REMEMBERED = 4

#: (receipt, component, position) of data under lock → its index.
_Locked = dict[tuple[int, ComponentType, int], int]


def page_tokens(pages: list[int], page_size: int, tail: int = 0) -> list[int]:
    """Tokens of whole pages, each known by its number, and ``tail`` tokens of one more."""
    tokens = [page * _PAGE_STRIDE + offset for page in pages for offset in range(page_size)]
    return tokens + [_PAGE_STRIDE * 99 + offset for offset in range(tail)]


class RandomProgram:
    """Requests at every stage of life, locks, matches and evictions, on one cache.

    Args:
        cache: with small pools, so that they run full; this program must be its only user.
        seed: of everything that is random.
        window_tokens: of the SWA component, if there is one; see `PaperDevice`.
    """

    def __init__(self, cache: BasePrefixCache, seed: int, window_tokens: int | None = None) -> None:
        self.cache = cache
        self.seed = seed
        self.steps = 0
        self.device = PaperDevice(cache, window_tokens)
        self._random = random.Random(seed)
        self._requests: dict[str, PlainRequest] = {}
        self._unstarted: set[str] = set()
        self._ended: list[PlainRequest] = []
        self._serial = 0
        self._locks: list[IncLockRefResult] = []
        self._actions: dict[Callable[[], str], int] = {
            self._match: 3,
            self._lock: 2,
            self._unlock: 2,
            self._release_early: 1,
            self._evict: 2,
            self._arrive: 5,
            self._compute: 9,
            self._publish: 3,
            self._leave: 3,
        }

    def run(self, steps: int) -> list[str]:
        """Take ``steps`` steps; the cache's digest after each.

        Raises AssertionError naming the seed, the step and the rule that a step broke, or what the
        cache raised.
        """
        return [self._step() for _ in range(steps)]

    def end(self) -> None:
        """Abort what is live, release what is locked, and check that all of it came back."""
        for rid in list(self._requests):
            self.cache.abort_req(self._requests.pop(rid))
        while self._locks:
            self._unlock()
        self.cache.check_invariants()
        check_nothing_is_held(self.cache, f"seed {self.seed}, at the end")

    def key(self) -> RadixKey:
        """A random key; prefixes of it are likely to be in the cache."""
        req = self._make_request()
        return req.key(len(req.token_ids))

    def _step(self) -> str:
        actions = list(self._actions)
        before = locked_indices(self.cache)
        (action,) = self._random.choices(actions, weights=list(self._actions.values()))
        done = action.__name__
        try:
            done = action()
            self.cache.check_invariants()
            self.device.check_tree()
            check_locked(before, locked_indices(self.cache))
        except Exception as error:
            raise AssertionError(
                f"seed {self.seed}, step {self.steps} ({done}): {type(error).__name__}: {error}"
            ) from error
        self.steps += 1
        return self.cache.digest()

    # -- raw calls -----------------------------------------------------------------------------

    def _match(self) -> str:
        key = self.key()
        check_peek(self.cache, key)
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        self.device.check_hit(key, match)
        return f"match {len(key)} tokens"

    def _lock(self) -> str:
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key()))
        self._locks.append(self.cache.inc_lock_ref(match.best_match_node))
        return f"lock {match.best_match_node}"

    def _unlock(self) -> str:
        if not self._locks:
            return "unlock nothing"
        lock = self._locks.pop(self._random.randrange(len(self._locks)))
        self.cache.dec_lock_ref(lock.node, lock.to_dec_params())
        return f"unlock {lock.node}"

    def _release_early(self) -> str:
        kinds = [component.kind for component in self.cache.components[1:]]
        if not self._locks or not kinds:
            return "release nothing early"
        lock, kind = self._random.choice(self._locks), self._random.choice(kinds)
        self.cache.release_early(lock, kind)
        return f"release {kind.name} of {lock.node} early"

    def _evict(self) -> str:
        dp_rank = self._random.randrange(self.cache.dp_size)
        amounts = {
            component.kind.evict_field: self._random.choice(
                (0, 0, 1, self.cache.page_size, component.allocator.capacity)
            )
            for component in self.cache.components
        }
        shortfall = self._random.random() < 0.5
        self.cache.evict(EvictParams(dp_rank=dp_rank, shortfall=shortfall, **amounts))
        return f"evict {amounts} on dp_rank {dp_rank}"

    def _evict_under_match(self, dp_rank: int) -> bool:
        """All that is not locked, of one component."""
        component = self._random.choice(self.cache.components)
        amount = {component.kind.evict_field: component.allocator.capacity}
        self.cache.evict(EvictParams(dp_rank=dp_rank, shortfall=False, **amount))
        return True

    # -- requests ------------------------------------------------------------------------------

    def _make_request(self) -> PlainRequest:
        """A new prompt, or one that goes on from what a live or an ended request has."""
        pages = self._random.choices(_PAGES, k=self._random.randint(1, _PAGES_MAX))
        page_size = self.cache.page_size
        tokens = page_tokens(pages, page_size, self._random.randrange(page_size))
        extra_key = self._random.choice(_EXTRA_KEYS)
        dp_rank = self._random.choice((0, 0, self.cache.dp_size - 1))
        known = [*self._requests.values(), *self._ended[-_REMEMBERED:]]
        if known and self._random.random() < 0.5:
            earlier = self._random.choice(known)
            tokens = earlier.token_ids + tokens[:page_size]
            extra_key, dp_rank = earlier.extra_key, earlier.dp_rank
        tokens = tokens[: self.cache.req_to_token.max_context_len]
        priority = self._random.randrange(3)
        return PlainRequest(f"r{self._serial}", tokens, extra_key, dp_rank, priority)

    def _pick(self) -> PlainRequest | None:
        return self._random.choice(list(self._requests.values())) if self._requests else None

    def _arrive(self) -> str:
        self._serial += 1
        req = self._make_request()
        match = self.cache.match_req(req)
        self.device.check_hit(req.key(len(req.token_ids)), match)
        evicted = self._random.random() < 0.2 and self._evict_under_match(req.dp_rank)
        try:
            state = self.cache.admit_req(req, match, len(req.token_ids) - match.hit_len)
        except StaleNodeError:
            assert evicted, f"{req.rid}: the match is stale, and nothing was evicted since"
            return f"{req.rid} has to match again"
        if state is None:
            return f"{req.rid} has to wait"
        self._requests[req.rid] = req
        self._unstarted.add(req.rid)
        if self._random.random() < 0.8:  # the others' first forward does it, if they live to it
            self._start(req)
        return f"admit {req.rid}, {len(req.token_ids)} tokens"

    def _start(self, req: PlainRequest) -> None:
        if req.rid in self._unstarted:
            self._unstarted.remove(req.rid)
            self.device.start(req)

    def _compute(self) -> str:
        req = self._pick()
        if req is None:
            return "compute nothing"
        state = self.cache.request_state(req.rid)
        self._start(req)
        largest = FORWARD_PAGES * self.cache.page_size
        most = self._random.choice((largest, self._random.randint(1, largest)))
        stop = min(state.computed_len + most, self.cache.req_to_token.max_context_len)
        grown = page_tokens(self._random.choices(_PAGES, k=1 + most), self.cache.page_size)
        req.token_ids += grown[: max(stop - len(req.token_ids), 0)]
        end = self.device.extend(req, stop)
        if end is None or self._random.random() < 0.1:  # a fault between extend and dispatch
            return f"extend {req.rid} towards {stop} tokens"
        self.device.forward(req, end)
        return f"compute {req.rid} up to {end} tokens"

    def _publish(self) -> str:
        req = self._pick()
        if req is None:
            return "publish nothing"
        self.cache.cache_unfinished_req(req)
        return f"publish {req.rid}"

    def _leave(self) -> str:
        req = self._pick()
        if req is None:
            return "end nothing"
        del self._requests[req.rid]
        self._ended.append(req)
        how = self._random.choice(("finish", "finish", "abort", "retract"))
        leave = {
            "finish": self.cache.cache_finished_req,
            "abort": self.cache.abort_req,
            "retract": self.cache.retract_req,
        }[how]
        leave(req)
        return f"{how} {req.rid}"


def check_peek(cache: BasePrefixCache, key: RadixKey) -> None:
    """`peek_prefix_len` answers what `match_prefix` will, and changes nothing."""
    before = cache.digest()
    peeked = cache.peek_prefix_len(key)
    assert cache.digest() == before, "peek_prefix_len changed the cache"
    hit_len = cache.match_prefix(MatchPrefixParams(key=key)).hit_len
    assert peeked == hit_len, f"peek_prefix_len says {peeked}, match_prefix hits {hit_len}"


def check_nothing_is_held(cache: BasePrefixCache, where: str) -> None:
    """With no request live and no lock held, every unit is free or evictable."""
    for component in cache.components:
        pool, name = component.allocator, component.kind.name
        for dp_rank in range(cache.dp_size):
            protected = pool.protected_size(dp_rank)
            assert not protected, f"{where}: {name}: {protected} units still locked"
            left = pool.available_size(dp_rank) + pool.evictable_size(dp_rank)
            assert left == pool.capacity, (
                f"{where}: {name}: {pool.capacity - left} of {pool.capacity} units leaked on "
                f"dp_rank {dp_rank}"
            )


def locked_indices(cache: BasePrefixCache) -> _Locked:
    """What each outstanding receipt protects."""
    return {
        (receipt_id, component.kind, position): index
        for receipt_id, anchor, grants in cache.receipts()
        for component, grant in zip(cache.components, grants, strict=True)
        if grant is not None
        for node in component.locked_by(anchor, grant)
        for position, index in positions(node, component.data(node).value)
    }


def check_locked(before: _Locked, after: _Locked) -> None:
    """Data under a lock that was not released is where it was."""
    held = {(receipt_id, kind) for receipt_id, kind, _ in after}
    for (receipt_id, kind, position), index in before.items():
        if (receipt_id, kind) not in held:
            continue
        now = after.get((receipt_id, kind, position))
        assert now == index, (
            f"locked {kind.name} data changed: token {position} under receipt {receipt_id} was at "
            f"index {index} and is at {now}"
        )
