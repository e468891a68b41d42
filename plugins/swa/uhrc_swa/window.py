"""WindowPlan: how many tokens a sliding window takes, of a request and of a lock."""

from __future__ import annotations

from dataclasses import dataclass

from uhrc_core.plugin_api import page_ceil, page_floor


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What a window takes, in tokens.

    Attributes:
        window_tokens: how many tokens a token attends to, itself included.
        extend_tokens: most tokens that one forward adds to a request.
        page_size: tokens per page.
    """

    window_tokens: int
    extend_tokens: int
    page_size: int

    def swa_evicted_seqlen(self, computed_len: int) -> int:
        """Tokens, in whole pages, that a sequence of ``computed_len`` tokens has left behind.

        The window and one page are kept, so that the sequence can be hit again both at its last
        page's end and, where its very last token must be computed again, a page earlier.
        """
        gone = max(computed_len - self.window_tokens - self.page_size, 0)
        return page_floor(gone, self.page_size)

    @property
    def locked_tokens(self) -> int:
        """The most a lock holds: what is kept of a sequence of whole pages."""
        return page_ceil(self.window_tokens, self.page_size) + self.page_size

    @property
    def request_owned_tokens(self) -> int:
        """The most a running request owns: the window, the page kept, a forward's tokens, and a
        page more for ends that fall inside pages."""
        return self.locked_tokens + page_ceil(self.extend_tokens, self.page_size) + self.page_size

    @property
    def request_tokens(self) -> int:
        """The most a running request owns and has locked in the tree."""
        return self.request_owned_tokens + self.locked_tokens
