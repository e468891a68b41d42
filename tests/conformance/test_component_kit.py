"""The component kit itself: each planted fault is found, and named."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conformance.failures import check_named
from uhrc_core.cache.eviction import LRU
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.pools import PagedTokenToKVPoolAllocator
from uhrc_core.pools.hybrid import HybridReqToTokenPool
from uhrc_core.testing import ComponentConformance, RandomProgram
from uhrc_full.component import FullComponent, FullHolding
from uhrc_recurrent.component import RecurrentComponent
from uhrc_recurrent.holding import RecurrentHolding, TrackPlan

ROOT = Path(__file__).parents[2]


class Releases(FullComponent):
    """A release lets go of the node for everybody."""

    def release(self, node, grant):
        for part in node.path_to_root():
            while self.data(part).lock_ref:
                self.unlock_one(part)


class LocksNothing(FullComponent):
    def acquire(self, node):
        return True

    def release(self, node, grant):
        pass


class EvictsLocked(FullComponent):
    def is_candidate(self, node):
        return self.data(node).value is not None and not node.children


class DoesNotRefresh(FullComponent):
    def refresh(self, path, now):
        pass


class NeverEvicts(FullComponent):
    def is_candidate(self, node):
        return False


class SharesOnSplit(FullComponent):
    def split(self, upper, lower):
        whole = self.data(lower).value
        super().split(upper, lower)
        self.data(upper).value = whole[: len(upper.key)]


class SwapsOnSplit(FullComponent):
    def split(self, upper, lower):
        whole = self.data(lower).value
        super().split(upper, lower)
        at = len(whole) - len(upper.key)
        self.data(lower).value, self.data(upper).value = whole[:at].copy(), whole[at:].copy()


class SplitsAtTheWrongPlace(FullComponent):
    """The last token before the cut is taken twice."""

    def split(self, upper, lower):
        super().split(upper, lower)
        self.data(lower).value[0] = self.data(upper).value[-1]


class UnlocksOnSplit(FullComponent):
    def split(self, upper, lower):
        super().split(upper, lower)
        self.data(upper).lock_ref = 0


def full_with(faulty):
    """The FULL component, its requests' holdings replaced by a faulty kind."""

    class Faulty(FullComponent):
        def admit(self, state, match):
            return faulty(state, self.allocator, match.device_indices)

    Faulty.__name__ = faulty.__name__
    return Faulty


class LeaksOnAbort(FullHolding):
    def end(self):
        pass


class LeaksWhatItCannotUse(FullHolding):
    """Takes the pages, then finds that another component has none."""

    def extend(self, num_tokens):
        return super().extend(num_tokens) and super().extend(num_tokens)


class RaisesWhenFull(FullHolding):
    def extend(self, num_tokens):
        assert super().extend(num_tokens), "out of memory"
        return True


class ReadsTheClock(FullComponent):
    def refresh(self, path, now):
        super().refresh(path, now)
        for node in path:
            self.data(node).hit_count = time.perf_counter_ns()


class PeekIsAUse(FullComponent):
    def match_validator(self):
        def accepts(node, num_tokens):
            self.data(node).hit_count += 1
            return True

        return accepts


class WritesTheRowWrong(FullHolding):
    """After a publish the row still names the request's own duplicates, which are free."""

    def published(self, result):
        start, stop = self.state.protected_len, result.prefix_len
        if stop > start:
            self.allocator.give_up_pages(self.pages(start, stop), self.state.dp_rank)


class SnapshotOfTheFork(RecurrentComponent):
    """A split takes the snapshot to the node that ends at the fork."""

    def split(self, upper, lower):
        self.data(upper).value, self.data(lower).value = self.data(lower).value, None
        self.data(lower).queued, self.data(upper).queued = 0, 0
        self.reconsider(upper)


class TrustsOldMatches(RecurrentComponent):
    def check_match(self, match):
        pass


class ClonesAnotherSlot(RecurrentComponent):
    def admit(self, state, match):
        holding = super().admit(state, match)
        if holding is not None and match.recurrent_cow_src is not None:
            holding.slots.clone_src = (match.recurrent_cow_src + 1) % self.allocator.capacity
        return holding


class KeepsCloning(RecurrentHolding):
    def started(self):
        pass


class ClonesTwice(RecurrentComponent):
    def admit(self, state, match):
        holding = super().admit(state, match)
        if holding is not None:
            holding.__class__ = KeepsCloning
        return holding


FAULTS = {
    Releases: "one holder's release took another's lock",
    LocksNothing: "locked data was evicted",
    EvictsLocked: "evicting while a prefix is locked: AssertionError: FULL data of <node",
    DoesNotRefresh: "FULL: a hit left no trace at",
    NeverEvicts: "FULL: 4 unlocked units cannot be evicted",
    SharesOnSplit: "is a view of another array; copy it",
    SwapsOnSplit: "split of a locked edge: AssertionError: a hit: token 0 at FULL index",
    UnlocksOnSplit: "split of a locked edge: AssertionError: RankCounts",
    SplitsAtTheWrongPlace: "the split moved or lost {(<ComponentType.FULL: 0>, 2): ",
    full_with(LeaksOnAbort): "abort after extend_req: FULL: 3 of 64 units leaked",
    full_with(LeaksWhatItCannotUse): "a pool runs full",
    full_with(RaisesWhenFull): "allocation 1 of FULL fails: AssertionError: seed 0, step",
    ReadsTheClock: "two caches with the same calls differ",
    PeekIsAUse: "peek_prefix_len changed the cache",
    full_with(WritesTheRowWrong): "its row differs from the tree",
    SnapshotOfTheFork: "holds another sequence's data",
    TrustsOldMatches: "RECURRENT evicted between match and admission: ",
    ClonesAnotherSlot: "which it is to copy, is not locked in the tree",
    ClonesTwice: "its state would be copied a second time",
}


def suite_of(component):
    """The kit on a cache with one faulty component."""

    class Suite(ComponentConformance):
        page_sizes = (1,)
        seeds = range(4)

        def make_cache(self, page_size, num_pages, dp_size):
            pool = PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, dp_size)
            slots = HybridReqToTokenPool(6, dp_size)
            plan = TrackPlan(num_tracks=0, interval=1, branching_grid=1)
            if issubclass(component, FullComponent):
                parts = [component(pool, LRU(), 2)]
            else:
                parts = [FullComponent(pool, LRU(), 2), component(slots, LRU(), 0, plan)]
            return UnifiedRadixCache(
                parts,
                page_size=page_size,
                dp_size=dp_size,
                max_requests=3,
                max_context_len=num_pages * page_size,
            )

    return Suite


@pytest.mark.parametrize("component", FAULTS, ids=lambda component: component.__name__)
def test_a_planted_fault_is_named(component):
    check_named(suite_of(component), FAULTS[component])


def test_a_random_failure_can_be_run_again_from_its_message():
    suite = suite_of(full_with(LeaksOnAbort))
    programs = [RandomProgram(suite().make_cache(1, 18, 2), seed=3) for _ in range(2)]
    messages = []
    for program in programs:
        with pytest.raises(AssertionError) as caught:
            program.run(80)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"seed 3, step {programs[0].steps} (")


def test_the_kit_needs_neither_jax_nor_pytest_until_a_recurrent_suite_runs():
    code = """
import sys
from tests.conformance.without_pytest import Suite
for name in dir(Suite):
    if name.startswith("test_"):
        getattr(Suite(), name)()
print(sorted({"jax", "pytest", "hypothesis"} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
