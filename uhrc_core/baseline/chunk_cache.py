"""ChunkCache: no prefix is ever shared; a request's own chunks are all it knows."""

from __future__ import annotations

from uhrc_core.baseline.radix_cache import RadixCache
from uhrc_core.cache.holding import RequestState
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.params import (
    Insertion,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    MissReason,
)
from uhrc_core.kinds import ComponentType


class ChunkCache(RadixCache):
    """A tree that stays empty: matches miss (``disabled``) and inserts leave all to the caller.

    Serves every kind of component: what a request holds, it holds alone and to its end.
    """

    _serves = frozenset(ComponentType)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        nothing = RadixKey([], params.key.extra_key, params.key.dp_rank)
        result = super().match_prefix(MatchPrefixParams(key=nothing))
        self._stats.query_num_tokens += len(params.key)
        self._stats.miss_reasons[MissReason.DISABLED] += 1
        result.miss_reason = MissReason.DISABLED
        return result

    def peek_prefix_len(self, key: RadixKey) -> int:
        return 0

    def _insert(self, insertion: Insertion, holder: RequestState | None) -> InsertResult:
        self._check_insert(insertion, 0)
        return InsertResult(prefix_len=0, inserted_len=0, node=self.nodes()[0])

    def _publish(self, state: RequestState, *, finished: bool) -> InsertResult | None:
        return None
