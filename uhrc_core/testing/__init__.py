"""What authors of components and caches test with: a naive reference to compare against."""

from uhrc_core.testing.reference import ReferenceCache, contents

__all__ = ["ReferenceCache", "contents"]
