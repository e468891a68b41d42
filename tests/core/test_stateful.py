"""Random programs of cache calls against a naive reference, every invariant after every step."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.support import PlainRequest, full_cache, paged_tokens, run_tokens
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import EvictParams, IncLockRefResult, InsertParams, MatchPrefixParams
from uhrc_core.errors import ReceiptError, StaleNodeError
from uhrc_core.kinds import ComponentType
from uhrc_core.testing import ReferenceCache, contents

EXAMPLES, STEPS = 100, 100
"""Up to 10,000 steps per page size; in fact some 8,000, since hypothesis ends some early."""

# Few distinct pages, so that prefixes are shared, split and extended often.
PAGES = st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=6)
SPACES = st.sampled_from([(None, 0), (None, 0), (None, 0), ("", 0), (("lora", "a"), 1)])
POOL_PAGES = 18


class CacheMachine(RuleBasedStateMachine):
    """Raw calls and whole requests mixed, on two ranks of few pages each."""

    page_size: int
    locks = Bundle("locks")

    @initialize()
    def start(self) -> None:
        self.cache = full_cache(POOL_PAGES, self.page_size, dp_size=2, max_requests=3)
        self.reference = ReferenceCache(self.page_size)
        self.requests: dict[str, PlainRequest] = {}
        self.serial = 0
        self.released: list[IncLockRefResult] = []

    def key(self, pages: list[int], tail: int, space: tuple[object, int]) -> RadixKey:
        tokens = paged_tokens(pages, self.page_size, tail % self.page_size)
        return RadixKey(tokens, *space)  # pyright: ignore[reportArgumentType]

    # -- raw calls -----------------------------------------------------------------------------

    @rule(pages=PAGES, tail=st.integers(0, 200), space=SPACES)
    def peek(self, pages: list[int], tail: int, space: tuple[object, int]) -> None:
        key, before = self.key(pages, tail, space), self.cache.digest()
        assert self.cache.peek_prefix_len(key) == self.reference.peek(key)
        assert self.cache.digest() == before

    @rule(pages=PAGES, tail=st.integers(0, 200), space=SPACES)
    def match(self, pages: list[int], tail: int, space: tuple[object, int]) -> None:
        key = self.key(pages, tail, space)
        result = self.cache.match_prefix(MatchPrefixParams(key=key))
        assert result.device_indices.tolist() == self.reference.match(key)
        assert result.best_match_node.end == result.hit_len == result.full_hit_length
        assert (result.miss_reason is None) == (result.hit_len == key.page_floor(self.page_size))

    @rule(pages=PAGES, tail=st.integers(0, 200), space=SPACES)
    def insert_other(self, pages: list[int], tail: int, space: tuple[object, int]) -> None:
        self.insert(pages[::-1], tail, space)

    @rule(pages=PAGES, tail=st.integers(0, 200), space=SPACES)
    def insert(self, pages: list[int], tail: int, space: tuple[object, int]) -> None:
        key = self.key(pages, tail, space)
        value = self.cache.token_allocator.alloc(len(key), key.dp_rank)
        if value is None:
            return
        result = self.cache.insert(InsertParams(key=key, value=value))
        assert result.prefix_len == self.reference.insert(key, value)
        self.cache.token_allocator.free(value[: result.prefix_len], key.dp_rank)
        self.cache.token_allocator.free(value[result.inserted_len :], key.dp_rank)

    @rule(
        num_pages=st.sampled_from([0, 1, 1, 2, 3, POOL_PAGES]),
        dp_rank=st.sampled_from([0, 0, 1]),
        shortfall=st.booleans(),
    )
    def evict(self, num_pages: int, dp_rank: int, shortfall: bool) -> None:
        self.evict_tokens(num_pages * self.page_size, dp_rank, shortfall)

    def evict_tokens(self, num_tokens: int, dp_rank: int, shortfall: bool) -> None:
        free = self.cache.available_size(ComponentType.FULL, dp_rank)
        wanted = max(num_tokens - free, 0) if shortfall else num_tokens
        other = {p for p in self.reference.pages if p[0][1] != dp_rank}
        result = self.cache.evict(
            EvictParams(num_tokens=num_tokens, dp_rank=dp_rank, shortfall=shortfall)
        )
        left = contents(self.cache)
        assert other <= left.keys(), "another rank's prefix was evicted"
        self.judge(left, wanted, result.num_tokens_evicted, dp_rank)

    def judge(self, left: dict[object, object], wanted: int, freed: int, dp_rank: int) -> None:
        mine = ReferenceCache(self.page_size)
        mine.pages = {p: v for p, v in self.reference.pages.items() if p[0][1] == dp_rank}
        mine.judge_eviction(left, wanted, freed)  # pyright: ignore[reportArgumentType]
        for prefix in [p for p in self.reference.pages if p not in left]:
            del self.reference.pages[prefix]

    # -- locks ---------------------------------------------------------------------------------

    @rule(target=locks, pages=PAGES, space=SPACES)
    def lock(self, pages: list[int], space: tuple[object, int]) -> object:
        key = self.key(pages, 0, space)
        result = self.cache.match_prefix(MatchPrefixParams(key=key))
        self.reference.match(key)
        receipt = self.cache.inc_lock_ref(result.best_match_node)
        self.reference.lock(key, result.hit_len, +1)
        return (receipt, key, result.hit_len)

    @rule(lock=consumes(locks))
    def unlock(self, lock: tuple[IncLockRefResult, RadixKey, int]) -> None:
        receipt, key, hit_len = lock
        self.cache.dec_lock_ref(receipt.node, receipt.to_dec_params())
        self.reference.lock(key, hit_len, -1)
        self.released.append(receipt)

    @rule(lock=locks)
    def unlock_twice_or_elsewhere(self, lock: tuple[IncLockRefResult, RadixKey, int]) -> None:
        before = self.cache.digest()
        for receipt in self.released[-1:]:
            with pytest.raises(ReceiptError):
                self.cache.dec_lock_ref(receipt.node, receipt.to_dec_params())
        stranger = UnifiedTreeNode(0, lock[1], None, 0, 0)
        with pytest.raises(ReceiptError):
            self.cache.dec_lock_ref(stranger, lock[0].to_dec_params())
        with pytest.raises(StaleNodeError):
            self.cache.inc_lock_ref(stranger)
        assert self.cache.digest() == before

    # -- requests ------------------------------------------------------------------------------

    @rule(pages=PAGES, tail=st.integers(1, 200), space=SPACES)
    def arrive(self, pages: list[int], tail: int, space: tuple[object, int]) -> None:
        tokens = paged_tokens(pages, self.page_size, tail % self.page_size + 1)
        self.serial += 1
        req = PlainRequest(f"r{self.serial}", tokens, *space)  # pyright: ignore
        match = self.cache.match_req(req)
        key = RadixKey(tokens[:-1], *space)  # pyright: ignore
        assert match.device_indices.tolist() == self.reference.match(key)
        state = self.cache.admit_req(req, match, num_tokens=len(tokens) - match.hit_len)
        if state is not None:
            self.requests[req.rid] = req
            self.reference.lock(key, match.hit_len, +1)

    def pick(self, choice: int) -> PlainRequest | None:
        live = list(self.requests.values())
        return live[choice % len(live)] if live else None

    @rule(choice=st.integers(0, 9), num_pages=st.integers(0, 3), tail=st.integers(0, 127))
    def compute(self, choice: int, num_pages: int, tail: int) -> None:
        req = self.pick(choice)
        if req is None:
            return
        num_tokens = num_pages * self.page_size + tail % self.page_size
        state = self.cache.request_state(req.rid)
        start = state.allocated_len
        upto = min(start + num_tokens, self.cache.req_to_token.max_context_len)
        grown = paged_tokens([0] * (upto // self.page_size + 1), self.page_size)
        req.token_ids += grown[len(req.token_ids) : upto]
        allocator = self.cache.token_allocator
        need = allocator.page_ceil(upto) - allocator.page_ceil(start)
        evictable = self.reference.evictable_tokens(req.dp_rank)
        free = self.cache.available_size(ComponentType.FULL, req.dp_rank)
        fits = run_tokens(self.cache, req, upto)
        assert fits == (need <= free + evictable)
        left = contents(self.cache)
        gone = sum(p not in left for p in self.reference.pages) * self.page_size
        assert fits or not gone, "evicted for a request that cannot be served anyway"
        self.judge(left, max(need - free, 0) if fits else 0, gone, req.dp_rank)  # type: ignore[arg-type]

    def published(self, req: PlainRequest, locked: int) -> RadixKey:
        """Mirror an insert of what the request has computed."""
        state = self.cache.request_state(req.rid)
        seqlen = state.computed_len // self.page_size * self.page_size
        key = RadixKey(req.token_ids[:seqlen], req.extra_key, req.dp_rank)
        if seqlen > locked:
            self.reference.insert(key, state.indices(0, seqlen).copy())
        return key

    @rule(choice=st.integers(0, 9))
    def unfinished(self, choice: int) -> None:
        req = self.pick(choice)
        if req is None:
            return
        state = self.cache.request_state(req.rid)
        locked = state.protected_len
        key = self.published(req, locked)
        self.cache.cache_unfinished_req(req)
        self.reference.lock(key, locked, -1)
        self.reference.lock(key, state.protected_len, +1)
        row = state.indices(0, state.protected_len).tolist()
        assert row == [
            i for p in self.reference.prefixes(key) for i in self.reference.pages[p].indices
        ]

    @rule(choice=st.integers(0, 9), how=st.sampled_from(["finish", "abort", "retract"]))
    def leave(self, choice: int, how: str) -> None:
        req = self.pick(choice)
        if req is None:
            return
        locked = self.cache.request_state(req.rid).protected_len
        key = RadixKey(req.token_ids, req.extra_key, req.dp_rank)
        if how == "abort":
            self.cache.abort_req(req)
        else:
            self.published(req, locked)
            leave = self.cache.cache_finished_req if how == "finish" else self.cache.retract_req
            leave(req)
        self.reference.lock(key, locked, -1)
        del self.requests[req.rid]

    # -- after every step ----------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.cache.check_invariants()
        assert contents(self.cache) == self.reference.expected()
        for dp_rank in range(2):
            evictable = self.cache.evictable_size(ComponentType.FULL, dp_rank)
            assert evictable == self.reference.evictable_tokens(dp_rank)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_random_programs_agree_with_the_reference(page_size: int) -> None:
    machine = type("Machine", (CacheMachine,), {"page_size": page_size})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
