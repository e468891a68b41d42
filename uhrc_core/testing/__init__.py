"""What authors of plugins test with: conformance suites to inherit, and a naive reference cache."""

from uhrc_core.testing.recurrent import RecurrentBackendConformance
from uhrc_core.testing.reference import ReferenceCache, contents

__all__ = ["RecurrentBackendConformance", "ReferenceCache", "contents"]
