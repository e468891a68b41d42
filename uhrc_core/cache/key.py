"""RadixKey: the tokens of a prefix and the namespace they live in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from uhrc_core.errors import InvalidKeyError

TokenArray = npt.NDArray[np.int32]
ExtraKey = None | str | int | tuple["ExtraKey", ...]
Namespace = tuple[ExtraKey, int]

TOKEN_BYTES: Final = 4
_TOKEN_MAX: Final = np.iinfo(np.int32).max
_EXTRA_KEY_DEPTH_MAX: Final = 8


class RadixKey:
    """An immutable token sequence inside one namespace, converted once per request.

    Args:
        tokens: token ids, ``list[int]`` or an integer array of shape ``[n_tokens]``; copied.
        extra_key: what else must be equal for two requests to share a prefix: ``None``, ``str``,
            ``int`` or a (nested) tuple of those, e.g. ``(("lora", "a"), ("salt", "bc"))``. Parts
            are compared as they are, never concatenated; ``None`` and ``""`` differ.
        dp_rank: data-parallel rank whose pools hold the prefix, ``>= 0``.

    Raises:
        InvalidKeyError: tokens that are not one-dimensional integers in ``[0, 2**31)``, or an
            extra_key or dp_rank of another type.

    The tokens are kept as ``bytes`` (native int32), since a bulk comparison of two keys is then a
    ``memcmp`` and a page of tokens is directly a dict key; `tokens` is a read-only view of them.
    `slice` copies, so that an edge of the tree keeps no whole prompt alive; `prefix` shares.
    """

    __slots__ = ("_bytes", "_len", "namespace")

    _bytes: bytes
    _len: int
    namespace: Namespace

    def __init__(
        self,
        tokens: list[int] | npt.NDArray[np.integer],
        extra_key: ExtraKey = None,
        dp_rank: int = 0,
    ) -> None:
        self._bytes = _token_bytes(tokens)
        self._len = len(self._bytes) // TOKEN_BYTES
        self.namespace = (_checked_extra_key(extra_key), _checked_rank(dp_rank))

    @classmethod
    def _of(cls, data: bytes, length: int, namespace: Namespace) -> RadixKey:
        key = cls.__new__(cls)
        key._bytes = data
        key._len = length
        key.namespace = namespace
        return key

    @property
    def data(self) -> bytes:
        """The tokens as native int32; a copy only of a `prefix`."""
        whole = self._len * TOKEN_BYTES
        return self._bytes if len(self._bytes) == whole else self._bytes[:whole]

    @property
    def tokens(self) -> TokenArray:
        """int32[n_tokens], a read-only view of the key's own memory."""
        return np.frombuffer(self._bytes, np.int32, self._len)

    @property
    def extra_key(self) -> ExtraKey:
        return self.namespace[0]

    @property
    def dp_rank(self) -> int:
        return self.namespace[1]

    def __len__(self) -> int:
        return self._len

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return self.namespace == other.namespace and self.data == other.data

    def __hash__(self) -> int:
        return hash((self.namespace, self.data))

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.tokens[:8].tolist()))
        more = ", …" if len(self) > 8 else ""
        return f"RadixKey([{shown}{more}] n={len(self)}, {self.extra_key!r}, rank {self.dp_rank})"

    def slice(self, start: int, stop: int) -> RadixKey:
        """The tokens in ``[start, stop)`` as a key of its own; copied, so nothing is kept alive."""
        stop = min(stop, self._len)
        part = self._bytes[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        return RadixKey._of(part, len(part) // TOKEN_BYTES, self.namespace)

    def prefix(self, stop: int) -> RadixKey:
        """The first ``stop`` tokens, sharing this key's memory: O(1)."""
        return RadixKey._of(self._bytes, min(stop, self._len), self.namespace)

    def extended(self, tokens: list[int] | npt.NDArray[np.integer]) -> RadixKey:
        """This key with more tokens behind it."""
        return RadixKey.joined((self, RadixKey(tokens)), self.namespace)

    @classmethod
    def joined(cls, edges: Sequence[RadixKey], namespace: Namespace | None = None) -> RadixKey:
        """The key that ``edges``, at least one, make up in this order, in the first one's
        namespace unless another is given."""
        data = b"".join([edge.data for edge in edges])
        return cls._of(data, len(data) // TOKEN_BYTES, namespace or edges[0].namespace)

    def page_floor(self, page_size: int) -> int:
        """Length in tokens of the whole pages of this key."""
        return len(self) // page_size * page_size

    def page(self, start: int, page_size: int) -> bytes:
        """The page that begins at token ``start``, as a dict key."""
        return self._bytes[start * TOKEN_BYTES : (start + page_size) * TOKEN_BYTES]

    def starts_with(self, edge: RadixKey, start: int) -> bool:
        """Whether all of ``edge`` stands in this key from token ``start`` on: one ``memcmp``."""
        if start + edge._len > self._len:
            return False
        return self._bytes.startswith(edge.data, start * TOKEN_BYTES)

    def common_len(self, edge: RadixKey, start: int, limit: int) -> int:
        """How many tokens of ``edge`` equal this key's from ``start`` on, up to ``limit``."""
        n = min(len(edge), limit - start)
        mine = np.frombuffer(self._bytes, np.int32, n, start * TOKEN_BYTES)
        differs = mine != np.frombuffer(edge._bytes, np.int32, n)
        first = int(differs.argmax()) if n else 0
        return first if n and differs[first] else n


def _token_bytes(tokens: list[int] | npt.NDArray[np.integer]) -> bytes:
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidKeyError(f"tokens: not a flat sequence of integers ({error})") from error
    if array.size == 0 and array.ndim == 1:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidKeyError(
            f"tokens: need integers of shape [n_tokens], got dtype {array.dtype}, "
            f"shape {list(array.shape)}; pass token ids as list[int] or int32[n]"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _TOKEN_MAX:
        raise InvalidKeyError(
            f"tokens: id {low if low < 0 else high} is outside [0, {_TOKEN_MAX}]; "
            "replace placeholder ids before they reach the cache"
        )
    return array.astype(np.int32, copy=False).tobytes()


def _checked_extra_key(extra_key: ExtraKey, depth: int = 0) -> ExtraKey:
    if extra_key is None or type(extra_key) is str:
        return extra_key
    if type(extra_key) is int and abs(extra_key) < 2**63:
        return extra_key
    if isinstance(extra_key, tuple) and depth < _EXTRA_KEY_DEPTH_MAX:
        return tuple(_checked_extra_key(part, depth + 1) for part in extra_key)
    raise InvalidKeyError(
        f"extra_key: a {type(extra_key).__name__} (nesting {depth}) cannot be a part of it; use "
        f"None, str, int64 or tuples of those, at most {_EXTRA_KEY_DEPTH_MAX} deep"
    )


def _checked_rank(dp_rank: int) -> int:
    if isinstance(dp_rank, (bool, np.bool_)) or not isinstance(dp_rank, (int, np.integer)):
        raise InvalidKeyError(f"dp_rank: {dp_rank!r} is not an integer rank")
    if dp_rank < 0:
        raise InvalidKeyError(f"dp_rank: {dp_rank} is negative; ranks count from 0")
    return int(dp_rank)
