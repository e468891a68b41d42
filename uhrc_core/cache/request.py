"""What the cache reads of an engine's request."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from uhrc_core.cache.key import ExtraKey, RadixKey


class Request(Protocol):
    """What the cache reads of an engine's request; it writes nothing to it.

    Attributes:
        rid: unique among live requests.
        token_ids: prompt and output so far, ``list[int]`` or int32[n]; only ever appended to.
        extra_key, dp_rank: the namespace; fixed once admitted.
        priority: for the ``priority`` eviction policy.
    """

    @property
    def rid(self) -> str: ...
    @property
    def token_ids(self) -> list[int] | npt.NDArray[np.int32]: ...
    @property
    def extra_key(self) -> ExtraKey: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def priority(self) -> int: ...


def key_of(req: Request) -> RadixKey:
    """The key of all its tokens so far; raises `InvalidKeyError` if they make no key."""
    return RadixKey(req.token_ids, req.extra_key, req.dp_rank)
