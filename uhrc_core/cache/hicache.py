"""HiCache: how a cache calls its host tier, or the null object where it has none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from uhrc_core.boundary import plugin_code
from uhrc_core.cache.component import HostNeed, TreeComponent
from uhrc_core.cache.host_tier import (
    DeviceSpan,
    HiCacheHooks,
    HostQuery,
    PrefetchEvent,
    WriteBackEvent,
    WriteThroughEvent,
)
from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.errors import PluginError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class HiCacheCalls:
    """What a cache calls; here the null object: no host tier, so nobody is asked or told."""

    hooks: HiCacheHooks | None = None
    fault: PluginError | None = None

    def lookup(self, key: RadixKey, hit_len: int, full_len: int) -> int:
        """How many tokens beyond the hit the host could add."""
        return 0

    def prefetch(
        self, key: RadixKey, needs: Sequence[HostNeed], indices: Sequence[IndexArray]
    ) -> bool:
        """Whether the data of ``key`` that ``needs`` name lies at fresh ``indices`` now."""
        return False

    def write_through(self, node: UnifiedTreeNode) -> None:
        """A request has left the path to ``node``."""

    def write_back(self, node: UnifiedTreeNode, components: Sequence[TreeComponent]) -> None:
        """These components' data at ``node`` is about to be dropped."""

    def reset(self) -> None:
        """Every prefix is forgotten."""


NO_HICACHE = HiCacheCalls()


class HiCache(HiCacheCalls):
    """Calls one tier: makes its events, checks its answers, contains its faults.

    Attributes:
        hooks: the tier.
        fault: why it is called no more; ``None``: it works.
    """

    def __init__(
        self,
        hooks: HiCacheHooks,
        components: Sequence[TreeComponent],
        page_size: int,
        bytes_per_unit: Mapping[ComponentType, float | None],
    ) -> None:
        self.hooks = self._hooks = hooks
        self.fault = None
        self._components = components
        self._page_size = page_size
        self._bytes_per_unit = bytes_per_unit

    def lookup(self, key: RadixKey, hit_len: int, full_len: int) -> int:
        key = key.slice(0, key.page_floor(self._page_size))
        if hit_len == len(key):
            return 0

        def needs(stop: int) -> tuple[HostNeed, ...] | None:
            if stop % self._page_size or not hit_len < stop <= len(key):
                raise ValueError(
                    f"depth {stop} must be whole pages of {self._page_size} beyond the hit of "
                    f"{hit_len} tokens and within the key's {len(key)}"
                )
            found = host_needs(self._components, hit_len, full_len, stop)
            return found and tuple(need for need in found if need.num_units)

        def ask() -> int:
            stop = self._hooks.lookup(HostQuery(key, hit_len, needs))
            if type(stop) is not int:
                raise TypeError(f"returned {stop!r}, which is no int")
            if stop and not needs(stop):
                raise ValueError(f"returned {stop}, where no hit can end")
            return stop - hit_len if stop else 0

        return self._call("lookup", ask, 0)

    def prefetch(
        self, key: RadixKey, needs: Sequence[HostNeed], indices: Sequence[IndexArray]
    ) -> bool:
        wanted = [(need, part) for need, part in zip(needs, indices, strict=True) if len(part)]
        spans = tuple(self._span(n.kind, n.start, n.stop, part) for n, part in wanted)
        event = PrefetchEvent((key,), min(span.start for span in spans), len(key), spans)

        def load() -> bool:
            done = self._hooks.prefetch(event)
            if type(done) is not bool:
                raise TypeError(f"returned {done!r}, which is no bool")
            return done

        return self._call("prefetch", load, False)

    def write_through(self, node: UnifiedTreeNode) -> None:
        path = [*node.path_to_root()][::-1]
        if path and self.fault is None:
            spans = (s for c in self._components for s in self._joined(self._spans(path, c)))
            event = WriteThroughEvent(node.edges(), 0, node.end, tuple(spans))
            self._call("write_through", lambda: self._hooks.write_through(event), None)

    def write_back(self, node: UnifiedTreeNode, components: Sequence[TreeComponent]) -> None:
        if self.fault is None:
            spans = (s for component in components for s in self._spans((node,), component))
            event = WriteBackEvent(node.edges(), node.start, node.end, tuple(spans))
            self._call("write_back", lambda: self._hooks.write_back(event), None)

    def reset(self) -> None:
        self._call("reset", self._hooks.reset, None)

    def _spans(
        self, path: Iterable[UnifiedTreeNode], component: TreeComponent
    ) -> Iterable[DeviceSpan]:
        for node in path:
            value = component.data(node).value
            if value is not None:
                yield self._span(component.kind, component.span_start(node), node.end, value)

    def _joined(self, spans: Iterable[DeviceSpan]) -> Iterable[DeviceSpan]:
        """With spans of tokens that continue each other made one."""
        run: list[DeviceSpan] = []
        for span in spans:
            if run and not (run[-1].stop == span.start < span.stop):
                yield self._one(run)
                run = []
            run.append(span)
        if run:
            yield self._one(run)

    def _one(self, run: Sequence[DeviceSpan]) -> DeviceSpan:
        indices = np.concatenate([span.indices for span in run])
        return self._span(run[0].kind, run[0].start, run[-1].stop, indices)

    def _span(self, kind: ComponentType, start: int, stop: int, indices: IndexArray) -> DeviceSpan:
        per_unit = self._bytes_per_unit.get(kind)
        shown = indices.copy()  # a tier's own, whatever it does to it
        shown.flags.writeable = False
        size = None if per_unit is None else round(per_unit * len(indices))
        return DeviceSpan(kind, start, stop, shown, size)

    def _call(self, hook: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The hook's answer; ``otherwise`` once there is a fault."""
        if self.fault is not None:
            return otherwise
        advice = "; the host tier is off from here on: report this to the plugin's author"
        try:
            with plugin_code(f"hicache: {hook} raised", advice):
                return call()
        except PluginError as error:
            self.fault = error
            _log.error("%s", error)
            return otherwise


def host_needs(
    components: Sequence[TreeComponent], hit_len: int, full_len: int, stop: int
) -> tuple[HostNeed, ...] | None:
    """What each component, in order, must get from the host; ``None``: no hit can end there."""
    needs = [component.host_need(hit_len, full_len, stop) for component in components]
    found = tuple(need for need in needs if need is not None)
    return found if len(found) == len(needs) else None
