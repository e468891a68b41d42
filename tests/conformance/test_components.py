"""The shipped kit on the components that are installed: FULL, and with it RECURRENT or SWA."""

from __future__ import annotations

from tests.recurrent.fake_device import hybrid_cache
from tests.support import full_cache
from tests.swa.fake_device import Sizes, window_cache
from uhrc_core.testing import FORWARD_PAGES, ComponentConformance
from uhrc_recurrent.component import TrackPlan


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
    def make_cache(self, page_size, num_pages, dp_size):
        return window_cache(
            Sizes(
                full_pages=num_pages,
                swa_pages=num_pages,
                page_size=page_size,
                window=page_size + 1,
                extend=FORWARD_PAGES * page_size,
                dp_size=dp_size,
                max_requests=3,
            )
        )
