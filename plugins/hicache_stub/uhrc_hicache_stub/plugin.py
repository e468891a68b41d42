"""What uhrc-hicache-stub declares: the host tier ``stub``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from uhrc_core.plugin_api import HiCacheContext, HiCacheParams, HiCacheSpec, PositiveInt, hookimpl

if TYPE_CHECKING:
    from uhrc_hicache_stub.hooks import RecordingHooks

UHRC_API = (1, 0)


class StubParams(HiCacheParams):
    """A host tier that records what it is told and holds nothing: to see what a real one would get.

    Leave the table out for no host tier.
    """

    num_records_max: PositiveInt = Field(
        default=1024, description="Latest events that are kept; all are counted."
    )


@hookimpl
def uhrc_hicache_hooks() -> list[HiCacheSpec]:
    return [HiCacheSpec("stub", StubParams, make_hooks)]


def make_hooks(params: StubParams, context: HiCacheContext) -> RecordingHooks:
    from uhrc_hicache_stub.hooks import RecordingHooks

    return RecordingHooks(params.num_records_max)
