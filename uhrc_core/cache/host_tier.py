"""HiCache: what a host tier is asked and told, so that evicted data can come back.

Three points in a request's life have a hook: it *arrives* and more of its prefix is held on the
host than on the device (`prefetch`), it *finishes* (`write_through`), data is *evicted*
(`write_back`). A tier that takes part implements `HiCacheHooks`; the cache calls it through a
`HiCache`, or calls the null object `NO_HICACHE`, at the same places (`uhrc_core.cache.hicache`).

The tree itself stays a device tree: a node knows nothing of the host (``host_value`` is ``None``
and ``host_lock_ref`` 0 everywhere). A tier finds its data by what it is: namespace and tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from uhrc_core.cache.component import HostNeed
from uhrc_core.cache.key import Namespace, RadixKey
from uhrc_core.errors import ConfigError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSpan:
    """Where one component's pool has some data.

    Attributes:
        kind: the component.
        start, stop: of tokens ``[start, stop)`` of the event's key; ``start == stop`` for
            RECURRENT: the state after exactly ``stop`` tokens.
        indices: int32[stop - start] token indices (FULL, SWA) or int32[1] slot, of the rank's own
            index space; read-only.
        num_bytes: on the device, padding included; ``None`` where no model is known.
    """

    kind: ComponentType
    start: int
    stop: int
    indices: IndexArray
    num_bytes: int | None


@dataclass(frozen=True, eq=False)
class HiCacheEvent:
    """Data of one prefix, or the place for it. Keep the event as long as you like; its indices
    stand for the data only during the call.

    Attributes:
        edges: the prefix in pieces, as the tree has them, at least one; see `key`.
        start, stop: the tokens that the event is about; ``stop`` is also the depth of the node
            that ends there.
        spans: the data, by component in the order of `ComponentType`, then by depth; never empty.
    """

    edges: tuple[RadixKey, ...]
    start: int
    stop: int
    spans: tuple[DeviceSpan, ...]

    @cached_property
    def key(self) -> RadixKey:
        """The prefix: all tokens ``[0, stop)`` that the data depends on, and their namespace.

        Put together when it is asked for: a long chain that is evicted node by node would copy
        its tokens once a node, for tiers that may not look at them.
        """
        return RadixKey.joined(self.edges)

    @property
    def namespace(self) -> Namespace:
        """(extra_key, dp_rank): data is never shared between two of them."""
        return self.edges[0].namespace

    @property
    def dp_rank(self) -> int:
        return self.edges[0].dp_rank

    @property
    def kinds(self) -> tuple[ComponentType, ...]:
        """The components that have a span here, each once."""
        return tuple(dict.fromkeys(span.kind for span in self.spans))

    @property
    def num_bytes(self) -> int | None:
        """Of all spans; ``None`` where no model is known."""
        sizes = [span.num_bytes for span in self.spans]
        return None if None in sizes else sum(size for size in sizes if size is not None)


class PrefetchEvent(HiCacheEvent):
    """Fresh indices to copy data to: what the device lacks for a hit to end at ``stop``."""


class WriteThroughEvent(HiCacheEvent):
    """All that the device has of the prefix that a finished request leaves; ``start`` is 0.

    The tokens as far as they were published, not those beyond the last whole page or snapshot;
    with a RECURRENT or SWA span for each node that has such data.
    """


class WriteBackEvent(HiCacheEvent):
    """What is about to be dropped at one node, whose edge is ``[start, stop)``.

    With every component that goes in this step, and no other: an internal node may lose a
    snapshot alone, a leaf loses all it has.
    """


@dataclass(frozen=True, slots=True, eq=False)
class HostQuery:
    """A request's prefix that the device holds only in part.

    Attributes:
        key: what may be hit: whole pages of all tokens but the last.
        hit_len: tokens that hit on the device already.
        needs: for a depth beyond the hit, what must come from the host for a hit to end there, a
            `HostNeed` each; ``None`` where none can.
    """

    key: RadixKey
    hit_len: int
    needs: Callable[[int], tuple[HostNeed, ...] | None]


class HiCacheHooks(ABC):
    """A host tier, as its author writes it. One object serves one cache, from one thread.

    What holds for every hook:

    - It is called inside a step of the cache: it must return soon, and must not call the cache.
    - Device indices in an event are valid until the hook returns, and no longer: afterwards others
      write there. A device copy that is dispatched before is in time, since later writes follow it.
    - Where hosts run in lockstep (SPMD), its answers may depend on the calls made so far and on
      nothing else, or the hosts' trees part ways.
    - What it raises never reaches the caller: the cache has changed nothing for it, notes the fault
      (`HiCache.fault`, and one line in the log), and calls this tier no more, since what a tier
      holds after a failure cannot be trusted. The cache goes on without a host tier.
    """

    @abstractmethod
    def lookup(self, query: HostQuery) -> int:
        """A request has arrived (`match_req`); how far could it hit with what is held here?

        Returns:
            A depth in whole pages, beyond ``query.hit_len`` and within the key, where every one of
            ``query.needs(depth)`` is held; the deepest there is. 0: none.
        """

    @abstractmethod
    def prefetch(self, event: PrefetchEvent) -> bool:
        """Copy the data of ``event.key`` from the host to the event's indices (`prefetch_req`).

        Write these indices and no others, all of them, or dispatch that, before returning. Room
        was made for them since the `lookup`, so `write_back` may have been called in between.

        Returns:
            Whether all of it is there. ``False``: it is no longer held; the indices are freed and
            the request computes these tokens. What was ``True`` becomes part of the tree.
        """

    @abstractmethod
    def write_through(self, event: WriteThroughEvent) -> None:
        """A request has finished or was retracted, after its tokens were published; none of its
        data has been evicted yet. Not called for one that is aborted."""

    @abstractmethod
    def write_back(self, event: WriteBackEvent) -> None:
        """Data of one node is evicted: it is valid a last time, since nothing is freed yet."""

    @abstractmethod
    def reset(self) -> None:
        """The cache was reset: forget every prefix (the model's weights may have changed)."""


@dataclass(frozen=True, slots=True)
class HiCacheComponent:
    """One component of the cache that a tier serves.

    Attributes:
        num_units: capacity per dp rank, in tokens or slots; rank r's index i is unit
            ``r * num_units + i`` of the device pool.
        bytes_per_unit: on the device; ``None`` where no model is known.
        device_pool: with ``read(units)`` and ``write(units, data)``; ``None`` when the cache was
            built without pools. Take it from `HiCacheContext.device_pools`, which says so.
    """

    num_units: int
    bytes_per_unit: float | None = None
    device_pool: Any = None


@dataclass(frozen=True, slots=True)
class HiCacheContext:
    """The cache that a tier is made for.

    Attributes:
        page_size: tokens per page; data moves in whole pages.
        dp_size: data-parallel ranks.
        components: by kind, in the order of `ComponentType`.
    """

    page_size: int
    dp_size: int
    components: Mapping[ComponentType, HiCacheComponent]

    @property
    def device_pools(self) -> Mapping[ComponentType, Any]:
        """The pool of every component, for a tier that moves data.

        A tier takes them while it is made, so that a cache without them is not assembled, rather
        than go without its tier from the first eviction on.

        Raises:
            ConfigError: the cache was built without.
        """
        pools = {kind: part.device_pool for kind, part in self.components.items()}
        missing = ", ".join(kind.name for kind, pool in pools.items() if pool is None)
        if missing:
            raise ConfigError(
                f"hicache.name: this tier moves data, and the cache was built without the device "
                f"pools of {missing}; pass them, build_kv_cache(resolved, "
                "make_device_pools(resolved)), or leave the [hicache] table out"
            )
        return pools
