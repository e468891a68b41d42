"""What authors of plugins test with: suites to inherit, random programs, failing allocators.

Nothing here is imported by the rest of the core. jax is imported when a suite that needs it runs.
"""

from uhrc_core.testing.actions import RandomProgram
from uhrc_core.testing.component import ComponentConformance
from uhrc_core.testing.declarations import RecurrentDeclarationConformance
from uhrc_core.testing.faults import failing_allocation
from uhrc_core.testing.hicache import CopyingTier, HiCacheConformance, HostTierConformance
from uhrc_core.testing.hicache_bench import PaperPool
from uhrc_core.testing.paper import FORWARD_PAGES, PaperDevice, PlainRequest
from uhrc_core.testing.recurrent import RecurrentBackendConformance
from uhrc_core.testing.reference import ReferenceCache, contents

__all__ = [
    "FORWARD_PAGES",
    "ComponentConformance",
    "CopyingTier",
    "HiCacheConformance",
    "HostTierConformance",
    "PaperDevice",
    "PaperPool",
    "PlainRequest",
    "RandomProgram",
    "RecurrentBackendConformance",
    "RecurrentDeclarationConformance",
    "ReferenceCache",
    "contents",
    "failing_allocation",
]
