"""A suite of the kit that imports what an author's would, and nothing of pytest's."""

from __future__ import annotations

from tests.support import full_cache
from uhrc_core.testing import ComponentConformance


class Suite(ComponentConformance):
    page_sizes = (2,)
    seeds = range(2)

    def make_cache(self, page_size, num_pages, dp_size):
        return full_cache(num_pages, page_size, dp_size=dp_size, max_requests=3)
