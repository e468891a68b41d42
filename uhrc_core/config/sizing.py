"""How large each pool is: what the config says, checked, or what the memory holds.

What the config sizes is taken first; one pool may be left open and gets the rest of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field, InstanceOf

from uhrc_core.boundary import call_factory
from uhrc_core.config.problems import Problems
from uhrc_core.config.resolved import ResolvedComponent
from uhrc_core.errors import ConfigError
from uhrc_core.indices import page_ceil, page_floor
from uhrc_core.registry.plan import PoolPlan
from uhrc_core.registry.specs import ComponentParams
from uhrc_core.registry.tables import INDEX_MAX, CacheConfig, PositiveInt

_Units = Annotated[int, Field(ge=0)]


class PoolSizing:
    """Sizes and plans the pools of a configuration.

    Args:
        hbm_bytes: device memory for the pools of one dp rank, if known.

        problems: where `size` notes what is wrong.
    """

    def __init__(self, cache: CacheConfig, hbm_bytes: int | None, problems: Problems) -> None:
        self._problems = problems
        self._modelled = False
        self._cache = cache
        self._hbm_bytes = hbm_bytes

    def size(self, parts: Sequence[ResolvedComponent]) -> tuple[ResolvedComponent, ...]:
        """The parts with every size set and, where the model is known, every pool planned.

        Incomplete when it notes ``problems``.
        """
        self._modelled = any(part.layers for part in parts)
        sizes = [(part, _num_units(part) or self._free_size(part)) for part in parts]
        planned = {
            part.spec.name: self._checked(part, size) for part, size in sizes if size is not None
        }
        unsized = [part for part, size in sizes if size is None]
        for part in unsized:
            if self._hbm_bytes is None or not part.layers or len(unsized) > 1:
                self._problems.add(
                    f"{part.key}.{part.params.size_key}",
                    "not set; set it, or set memory.hbm_bytes and model.hf_config to have one pool "
                    "sized",
                )
            else:
                left = self._hbm_bytes - self._num_bytes(planned.values())
                planned[part.spec.name] = self._filling(part, left)
        used = self._num_bytes(planned.values())
        if self._hbm_bytes is not None and used > self._hbm_bytes and not self._problems:
            self._problems.add(
                "memory.hbm_bytes",
                f"the pools of one dp rank take {used}; make them smaller",
                self._hbm_bytes,
            )
        return tuple(planned[part.spec.name] for part in parts if part.spec.name in planned)

    def _free_size(self, part: ResolvedComponent) -> int | None:
        """For a pool that takes no memory, as the model has no layer for it: what all requests may
        hold; else ``None``."""
        if part.layers or not self._modelled:
            return None
        cache = self._cache
        wanted = page_ceil(cache.max_context_len, cache.page_size) * cache.max_requests
        return min(wanted, page_floor(INDEX_MAX // cache.dp_size, cache.page_size))

    def _filling(self, part: ResolvedComponent, num_bytes: int) -> ResolvedComponent:
        """The part with the largest pool that ``num_bytes`` hold on one dp rank."""
        num_min = self._num_units_min(part)
        smallest = self._with_num_units(part, num_min)
        bytes_min = self._num_bytes([smallest])
        num_units = num_bytes * num_min // bytes_min if bytes_min else 0
        if self._problems:
            return part
        if num_units < num_min:
            self._problems.add(
                "memory.hbm_bytes",
                f"the other pools leave {num_bytes} bytes for {part.key}, where one request of "
                f"cache.max_context_len = {self._cache.max_context_len} tokens needs {bytes_min}; "
                f"{part.params.size_advice}",
                self._hbm_bytes,
            )
            return part
        return self._with_num_units(part, min(num_units, INDEX_MAX // self._cache.dp_size))

    def _checked(self, part: ResolvedComponent, num_units: int) -> ResolvedComponent:
        """The part planned, after checking the size that its table gives."""
        cache = self._cache
        key = f"{part.key}.{part.params.size_key}"
        part = replace(part, params=self._resized(part, num_units))
        whole = _num_units(part)
        num_min = self._num_units_min(part)
        if num_units >= num_min and whole != num_units:
            self._problems.add(
                key,
                f"not whole pages of cache.page_size = {cache.page_size}; {whole} would be",
                num_units,
            )
        if num_units * cache.dp_size > INDEX_MAX:
            self._problems.add(
                key,
                f"on cache.dp_size = {cache.dp_size} ranks, more than {INDEX_MAX} int32 indices; "
                "lower it",
                num_units,
            )
        if num_units < num_min:
            self._problems.add(
                key,
                f"one request of cache.max_context_len = {cache.max_context_len} tokens needs "
                f"{num_min}; {part.params.size_advice}",
                num_units,
            )
        return part if self._problems else self._planned(part)

    def _with_num_units(self, part: ResolvedComponent, num_units: int) -> ResolvedComponent:
        return self._planned(replace(part, params=self._resized(part, num_units)))

    def _resized(self, part: ResolvedComponent, num_units: int) -> ComponentParams:
        resize = part.params.with_num_units
        page_size = self._cache.page_size
        params = InstanceOf[ComponentParams]
        return call_factory(part.key, "with_num_units", params, resize, num_units, page_size)

    def _planned(self, part: ResolvedComponent) -> ResolvedComponent:
        if not self._modelled:
            return part
        spec = part.spec
        try:
            pool: PoolPlan = call_factory(
                part.key,
                "plan_pool",
                PoolPlan,
                spec.plan_pool,
                part.params,
                part.context,
                part.layers,
            )
        except ConfigError as error:
            self._problems.add_lines(f"{part.key}: {line}" for line in error.problems)
            return part
        return replace(part, pool=pool)

    def _num_bytes(self, parts: Iterable[ResolvedComponent]) -> int:
        """Bytes of the planned pools on one dp rank."""
        return sum(part.pool.num_bytes for part in parts if part.pool) // self._cache.dp_size

    def _num_units_min(self, part: ResolvedComponent) -> int:
        cache, least = self._cache, part.params.num_units_min
        return call_factory(
            part.key, "num_units_min", PositiveInt, least, cache.page_size, cache.max_context_len
        )


def _num_units(part: ResolvedComponent) -> int | None:
    return call_factory(part.key, "num_units", _Units | None, lambda: part.params.num_units)
