"""Every error this library raises on purpose, by whose mistake it reports.

`ConfigError` is the operator's, `PluginError` the plugin author's, the `CacheError` family the
calling engine's. Each message names the thing, the value it saw, and the next step. A bare
`AssertionError` is ours alone. An operation that raises a `CacheError` has changed nothing.
"""


class UHRCError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(UHRCError):
    """A configuration that cannot be assembled; lists every problem found, one a line."""

    def __init__(self, problems: str | list[str] | tuple[str, ...]) -> None:
        self.problems: tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        super().__init__("\n".join(self.problems))


class PluginError(UHRCError):
    """A plugin that is missing, broken, in conflict or of another API version."""


class CacheError(UHRCError):
    """Base of the errors a caller of the cache can cause; the cache is unchanged."""


class InvalidKeyError(CacheError):
    """Tokens, extra_key or dp_rank that cannot form a `RadixKey` of this cache."""


class InvalidIndexError(CacheError):
    """Pool indices that are duplicated, out of range, not whole pages, or not allocated."""


class InvalidParamsError(CacheError):
    """A parameter whose value contradicts the others or this cache."""


class StaleNodeError(CacheError):
    """A node that was evicted, or that belongs to another cache."""


class ReceiptError(CacheError):
    """A lock receipt that was released already, names another node, or is not this cache's."""


class RequestError(CacheError):
    """A request unknown to this cache, registered twice, or in the wrong phase of its life."""


class RequestTooLargeError(RequestError):
    """A request that could not run even on an empty pool; the message shows the sum."""


class InvariantError(UHRCError):
    """`check_invariants` found the cache inconsistent; carries a dump of the whole state."""
