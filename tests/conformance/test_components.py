"""The shipped kit on the components that are installed: FULL, and with it RECURRENT or SWA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.recurrent.fake_device import hybrid_cache
from tests.support import full_cache
from tests.swa.fake_device import Sizes, window_cache
from uhrc_core.baseline import RadixCache, SWARadixCache
from uhrc_core.cache.tree import UnifiedRadixCache
from uhrc_core.registry.catalog import installed_plugins
from uhrc_core.testing import FORWARD_PAGES, ComponentConformance
from uhrc_recurrent.holding import TrackPlan

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = ("uhrc-full", "uhrc-swa", "uhrc-recurrent")


class TestFull(ComponentConformance):
    page_sizes = (1, 4, 16)

    def make_cache(self, page_size, num_pages, dp_size):
        return full_cache(num_pages, page_size, dp_size=dp_size, max_requests=3)


class TestRecurrentBasePath(ComponentConformance):
    page_sizes = (1,)

    def make_cache(self, page_size, num_pages, dp_size):
        return hybrid_cache(num_pages, 1, num_slots=6, dp_size=dp_size, max_requests=3)


class TestRecurrentExtraBuffer(ComponentConformance):
    page_sizes = (4, 16)
    num_tracks = 1

    def make_cache(self, page_size, num_pages, dp_size):
        return hybrid_cache(
            num_pages,
            page_size,
            num_slots=12,
            plan=TrackPlan(self.num_tracks, interval=page_size, branching_grid=page_size),
            dp_size=dp_size,
            max_requests=3,
        )


class TestRecurrentOverlappingSteps(TestRecurrentExtraBuffer):
    page_sizes = (4,)
    num_tracks = 2


class TestSWA(ComponentConformance):
    cache_class = UnifiedRadixCache

    def window_tokens(self, page_size):
        return page_size + 1

    def make_cache(self, page_size, num_pages, dp_size):
        return window_cache(
            Sizes(
                full_pages=num_pages,
                swa_pages=num_pages,
                page_size=page_size,
                window=self.window_tokens(page_size),
                extend=FORWARD_PAGES * page_size,
                dp_size=dp_size,
                max_requests=3,
            ),
            self.cache_class,
        )


class TestBaselineFull(ComponentConformance):
    """The plain cache that the unified tree replaces keeps the same rules."""

    seeds = range(4)

    def make_cache(self, page_size, num_pages, dp_size):
        return RadixCache(
            full_cache(num_pages, page_size, dp_size=dp_size).components,
            page_size=page_size,
            dp_size=dp_size,
            max_requests=3,
            max_context_len=num_pages * page_size,
        )


class TestBaselineSWA(TestSWA):
    seeds = range(4)
    cache_class = SWARadixCache


HASH_SEED_PROGRAM = """
from tests.conformance import test_components as suites
from uhrc_core.testing import RandomProgram
for suite in (suites.TestFull, suites.TestRecurrentBasePath, suites.TestSWA):
    program = RandomProgram(suite().make_cache(1, 18, 2), 5, suite().window_tokens(1))
    print(program.run(80)[-1])
"""


def test_another_process_with_other_hashes_takes_the_same_decisions():
    digests = [
        subprocess.run(
            [sys.executable, "-c", HASH_SEED_PROGRAM],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert digests[0] == digests[1] and len(set(digests[0])) == 3


def test_every_component_of_this_repository_is_tested_here():
    catalog = installed_plugins({})
    ours = [entry.name for entry in catalog.entries if entry.distribution in DISTRIBUTIONS]
    assert sorted(catalog.load(ours).components) == ["full", "recurrent", "swa"]
