"""How much room an admission must leave: the headroom rule.

A request may write up to ``max_len`` tokens, but most stop earlier, so keeping back all that the
running requests *could* write would leave the pool half empty. Keeping back nothing would admit
requests that are retracted at once. The rule between the two: each request, running or new, is
counted with the tokens it already has plus at most ``headroom_tokens`` more. What is written beyond
that is paid for by retraction, if it comes to that.

With ``headroom_tokens >= 1`` a request that was just retracted for lack of room is not admitted
again before room appears: it would need the page that was missing, and its own next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from uhrc_core.indices import page_ceil


class TokenNeed(NamedTuple):
    """What one request has and may still want, in tokens.

    Attributes:
        allocated_len: tokens that have a pool index (of a new request: its hit).
        known_len: prompt and output so far; all of these must be computed.
        max_len: the most tokens it can ever hold in the pool.
    """

    allocated_len: int
    known_len: int
    max_len: int

    def reserve(self, headroom_tokens: int, page_size: int) -> int:
        """Tokens in whole pages that the rule keeps for this request beside what it has."""
        target = min(self.known_len + headroom_tokens, self.max_len)
        return max(0, page_ceil(target, page_size) - page_ceil(self.allocated_len, page_size))


def admission_tokens(
    new: TokenNeed, running: Iterable[TokenNeed], headroom_tokens: int, page_size: int
) -> int:
    """What must be free or evictable beside the new request's hit, for `admit_req`.

    Tokens, in whole pages: the sum of `TokenNeed.reserve` over the new and the running requests of
    one dp rank.
    """
    reserves = (need.reserve(headroom_tokens, page_size) for need in running)
    return new.reserve(headroom_tokens, page_size) + sum(reserves)
