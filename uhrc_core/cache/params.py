"""Typed parameters and results of the cache's operations (RFC 4.6).

Parameters are frozen pydantic models, checked where they are made; results are plain slotted
dataclasses. Lengths and quotas name their unit: tokens for FULL and SWA, slots for RECURRENT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.request import Request
from uhrc_core.errors import InvalidParamsError
from uhrc_core.indices import IndexArray, index_array
from uhrc_core.kinds import ComponentType
from uhrc_core.pools.ledger import Owner

Indices = Annotated[IndexArray, PlainValidator(index_array)]


class Params(BaseModel):
    """Base of all parameter models: frozen, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True
    )

    if not TYPE_CHECKING:  # the checker keeps the signature pydantic synthesizes

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                name = type(self).__name__
                raise InvalidParamsError(
                    "; ".join(
                        f"{name}.{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}"
                        for e in error.errors()
                    )
                ) from error


class MatchPrefixParams(Params):
    """What to look up. Only whole pages of ``key`` can match.

    ``cow_recurrent`` asks for the source of a copy-on-write clone of the recurrent state.
    """

    key: RadixKey
    cow_recurrent: bool = False


class InsertParams(Params):
    """A computed prefix to publish.

    Attributes:
        key: the tokens; only whole pages are inserted.
        value: int32[len(key) - prev_prefix_len] FULL pool indices of the tokens from there on. The
            cache copies what it keeps.
        prev_prefix_len: tokens the caller already holds from the tree (its locked prefix), whole
            pages.
        priority: raises the priority of every node on the path (``priority`` policy).
        swa_evicted_seqlen: whole pages. Before it (and before ``prev_prefix_len``) the caller holds
            no SWA data. From there on every index of ``value`` is mapped to an SWA index that the
            caller holds.
        recurrent_value: slot that holds the recurrent state after exactly ``recurrent_seqlen``
            tokens; the tree takes it over unless it has a snapshot there (`InsertResult`).
        recurrent_seqlen: where the snapshot belongs, whole pages, within the key; needed with
            ``recurrent_value``.
    """

    key: RadixKey
    value: Indices
    prev_prefix_len: int = Field(default=0, ge=0)
    priority: int = 0
    swa_evicted_seqlen: int = Field(default=0, ge=0)
    recurrent_value: int | None = Field(default=None, ge=0, lt=2**31)
    recurrent_seqlen: int | None = Field(default=None, gt=0)


@dataclass(slots=True)
class Insertion:
    """One insert under way, as the components see it.

    Attributes:
        key: the tokens, whole pages.
        start: how many tokens the giver holds from the tree already.
        value: int32[len(key) - start] FULL indices of the tokens from ``start`` on.
        giver: who owns what is offered; the cache checks what a caller says.
        now: time of the insert, set by the tree.
        priority, swa_evicted_seqlen, recurrent_value, recurrent_seqlen: as in `InsertParams`.
    """

    key: RadixKey
    start: int
    value: IndexArray
    giver: Owner
    priority: int = 0
    swa_evicted_seqlen: int = 0
    recurrent_value: int | None = None
    recurrent_seqlen: int | None = None
    now: int = 0

    def indices(self, start: int, stop: int) -> IndexArray:
        """int32[stop - start], a view: the FULL indices of tokens ``[start, stop)``."""
        return self.value[start - self.start : stop - self.start]

    @property
    def swa_start(self) -> int:
        """Depth from which on the insert brings SWA data."""
        return max(self.swa_evicted_seqlen, self.start)


class EvictParams(Params):
    """What to reclaim on one rank, per component.

    With ``shortfall`` the numbers are not quotas to evict but amounts the allocator must be able to
    serve: eviction stops as soon as that many are free, whatever freed them.
    """

    num_tokens: int = Field(default=0, ge=0)
    swa_num_tokens: int = Field(default=0, ge=0)
    recurrent_num: int = Field(default=0, ge=0)
    dp_rank: int = Field(default=0, ge=0)
    shortfall: bool = False

    def amount(self, kind: ComponentType) -> int:
        """Requested amount of one component, in its own unit."""
        return (self.num_tokens, self.swa_num_tokens, self.recurrent_num)[kind]


class MissReason(StrEnum):
    """What kept a match from being longer."""

    NO_PREFIX = "no_prefix"
    FULL_EVICTED = "full_evicted"
    SWA_WINDOW = "swa_window"
    NO_SNAPSHOT = "no_snapshot"
    DISABLED = "disabled"


@dataclass(slots=True)
class MatchResult:
    """The reusable prefix of a key.

    Attributes:
        device_indices: int32[hit] FULL pool indices, a copy; valid while the node is locked.
        last_device_node, last_host_node, best_match_node: the deepest node every component
            accepts. All three are the same node, as the tree has only device data. Lock it before
            anything evicts.
        host_hit_length: tokens by which `prefetch_req` could make the hit longer, from a host
            tier; set by `match_req`.
        full_hit_length: tokens FULL alone would allow, at least the hit.
        recurrent_cow_src: slot to clone the recurrent state from, when asked for and there is one.
        recurrent_branching_seqlen: where the scheduler should take a snapshot, so that the next
            request of this prefix hits it; ``None`` when the hit is as long as FULL allows.
        miss_reason: what limited the hit; ``None`` when the whole key (in pages) hit.
        request, key: set by `match_req`: the request that it matched, and the request's tokens
            then, so that they need not be converted again.
    """

    device_indices: IndexArray
    last_device_node: UnifiedTreeNode
    last_host_node: UnifiedTreeNode
    best_match_node: UnifiedTreeNode
    host_hit_length: int = 0
    full_hit_length: int = 0
    recurrent_cow_src: int | None = None
    recurrent_branching_seqlen: int | None = None
    miss_reason: MissReason | None = None
    request: Request | None = field(default=None, repr=False)
    key: RadixKey | None = field(default=None, repr=False)

    @property
    def hit_len(self) -> int:
        """Tokens of the key that need not be computed."""
        return len(self.device_indices)


@dataclass(slots=True)
class InsertResult:
    """What an insert found.

    Attributes:
        prefix_len: tokens the tree already had. It keeps its own indices there; the caller frees
            its duplicates in ``[prev_prefix_len, prefix_len)`` and gives away the rest.
        inserted_len: tokens of the key now in the tree (whole pages); the caller keeps the tail.
        node: the node that ends at ``inserted_len``.
        recurrent_exist: a snapshot was there already, so the donor keeps (then frees) its slot.
    """

    prefix_len: int
    inserted_len: int
    node: UnifiedTreeNode
    recurrent_exist: bool = False


@dataclass(slots=True)
class EvictResult:
    """What an eviction freed, per component, in its own unit."""

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    recurrent_num_evicted: int = 0

    def __add__(self, other: EvictResult) -> EvictResult:
        return EvictResult(
            self.num_tokens_evicted + other.num_tokens_evicted,
            self.swa_num_tokens_evicted + other.swa_num_tokens_evicted,
            self.recurrent_num_evicted + other.recurrent_num_evicted,
        )


@dataclass(frozen=True, slots=True)
class DecLockRefParams:
    """The receipt a release must present: which acquisition it undoes."""

    receipt_id: int


@dataclass(frozen=True, slots=True)
class IncLockRefResult:
    """The receipt of one acquisition, anchored at the node that was locked."""

    receipt_id: int
    node: UnifiedTreeNode

    def to_dec_params(self) -> DecLockRefParams:
        return DecLockRefParams(self.receipt_id)


@dataclass(slots=True)
class CacheStats:
    """Running totals since construction or `reset`; lengths in tokens.

    ``prefetched_num_tokens`` says by how much prefetches from a host tier made hits longer; those
    tokens are not in the hits, what they brought is in the inserts.
    """

    match_count: int = 0
    query_num_tokens: int = 0
    hit_num_tokens: int = 0
    prefetched_num_tokens: int = 0
    insert_count: int = 0
    inserted_num_tokens: int = 0
    inserted_num_snapshots: int = 0
    evicted: EvictResult = field(default_factory=EvictResult)
    miss_reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
