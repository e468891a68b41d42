"""A recurrent model on paper: each slot holds the very tokens its state has seen.

It drives requests through a (FULL, RECURRENT) cache as an engine would, and checks at every clone
that the snapshot is the state after exactly the tokens of the hit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support import PlainRequest
from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.params import MatchResult
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedTokenToKVPoolAllocator
from uhrc_core.pools.hybrid import HybridReqToTokenPool
from uhrc_full.component import FullComponent
from uhrc_recurrent.component import RecurrentComponent
from uhrc_recurrent.holding import TrackPlan

RECURRENT = ComponentType.RECURRENT


def hybrid_cache(
    num_pages: int = 32,
    page_size: int = 1,
    *,
    num_slots: int = 8,
    plan: TrackPlan | None = None,
    dp_size: int = 1,
    max_requests: int = 4,
) -> UnifiedRadixCache:
    """(FULL, RECURRENT); without a plan, the base path (page_size 1, no track slots)."""
    tokens = PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, dp_size)
    slots = HybridReqToTokenPool(num_slots, dp_size)
    plan = plan or TrackPlan(num_tracks=0, interval=1, branching_grid=1)
    return UnifiedRadixCache(
        [FullComponent(tokens, LRU(), 2), RecurrentComponent(slots, LRU(), 0, plan)],
        page_size=page_size,
        dp_size=dp_size,
        max_requests=max_requests,
        max_context_len=num_pages * page_size,
    )


def component_of(cache: UnifiedRadixCache) -> RecurrentComponent:
    component = cache.components[1]
    assert isinstance(component, RecurrentComponent)
    return component


@dataclass
class FakeDevice:
    """Slot contents per dp rank, and the engine's side of a request's life."""

    cache: UnifiedRadixCache
    slots: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def admit(self, req: PlainRequest) -> MatchResult | None:
        """Match and admit, without the clone yet; ``None``: it must wait."""
        match = self.cache.match_req(req)
        need = len(req.token_ids) - match.hit_len
        return match if self.cache.admit_req(req, match, num_tokens=need) else None

    def clone(self, req: PlainRequest) -> None:
        """Copy the snapshot into the running slot, or start from nothing."""
        computed = self.cache.request_state(req.rid).computed_len
        slots = self.cache.state_slots(req, computed, computed + 1)
        assert slots is not None
        seen = tuple(req.token_ids[:computed])
        if slots.clone_src is None:
            assert not seen, "a hit without a snapshot to clone"
        else:
            assert self.slots[req.dp_rank, slots.clone_src] == seen, "snapshot of other tokens"
        self.slots[req.dp_rank, slots.running] = seen
        self.cache.started_req(req)

    def forward(self, req: PlainRequest, stop: int) -> bool:
        """One forward up to ``stop`` tokens; ``False``: the KV pool is short."""
        state = self.cache.request_state(req.rid)
        start = state.computed_len
        if self.cache.extend_req(req, stop - state.allocated_len) is None:
            return False
        slots = self.cache.state_slots(req, start, stop)
        assert slots is not None and slots.clone_src is None
        running = (req.dp_rank, slots.running)
        assert len(self.slots[running]) == start
        self.slots[running] = tuple(req.token_ids[:stop])
        if slots.track is not None:
            self.slots[req.dp_rank, slots.track] = self.slots[running]
        self.cache.advance_req(req, stop - start)
        return True

    def prefill(self, req: PlainRequest, chunk: int = 10**9, upto: int | None = None) -> bool:
        """Forwards up to the prompt's end, cut at chunks and where the cache says."""
        stop = len(req.token_ids) if upto is None else upto
        while (start := self.cache.request_state(req.rid).computed_len) < stop:
            end = min((start // chunk + 1) * chunk, stop)
            end = next(iter(self.cache.cuts(req, start, end)), end)
            if not self.forward(req, end):
                return False
            self.cache.cache_unfinished_req(req)
        return True

    def serve(self, tokens: list[int], rid: str = "r", chunk: int = 10**9) -> MatchResult:
        """A whole request; its match."""
        req = PlainRequest(rid, tokens)
        match = self.admit(req)
        assert match is not None, "the test's pools are too small"
        self.clone(req)
        assert self.prefill(req, chunk)
        self.cache.cache_finished_req(req)
        self.check()
        return match

    def check(self) -> None:
        """Every invariant, and every snapshot in the tree is the state at its node's end."""
        self.cache.check_invariants()
        for node in self.cache.nodes()[1:]:
            value = node.component_data[RECURRENT].value
            if value is not None:
                path = [*node.path_to_root()][::-1]
                tokens = [t for part in path for t in part.key.tokens.tolist()]
                assert self.slots[node.dp_rank, int(value[0])] == tuple(tokens), node
