"""What a caller asks of the engine, what it gets back, and the scheduler's record in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from uhrc_core.cache.key import ExtraKey, RadixKey
from uhrc_core.errors import InvalidKeyError, UHRCError

TokenIds = Sequence[int] | npt.NDArray[np.integer]


class EngineError(UHRCError):
    """Base of the engine's own errors."""


class InvalidRequestError(EngineError, ValueError):
    """A request with a field that makes no sense; the engine is unchanged and usable."""


class OutOfPagesError(EngineError):
    """A request that cannot go on although nothing else is left to retract."""


class EngineBusyError(EngineError):
    """`generate` and `stream` need an engine without other requests in flight."""


class FinishReason(StrEnum):
    """Why a request left the engine."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to run.

    Attributes:
        token_ids: the prompt, integers of shape [n >= 1] below the model's vocabulary size.
        max_new_tokens: the most tokens to generate, >= 1.
        temperature: 0 = greedy; else the logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 = all.
        seed: of the request's own random draws, in [0, 2**32).
        stop_token_ids: generating one of these ends the request; it is part of the output.
        extra_key: cache namespace, e.g. ``(("lora", "a"),)``; nothing is shared across namespaces.
        priority: for the cache's ``priority`` eviction policy; the order of service ignores it.
        rid: unique among requests in flight; empty: the engine makes one up.
    """

    token_ids: TokenIds
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    extra_key: ExtraKey = None
    priority: int = 0
    rid: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """How a request ended.

    Attributes:
        rid: of the request.
        token_ids: what was generated, a stop token included.
        finish_reason: why it ended; with ``error`` the cause is in `error`.
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens that did not have to be computed at first admission.
        first_logits: float32[vocab] at the last prompt token, the caller's to keep; ``None`` when
            the request ended before its prompt was computed.
        ttft_s: seconds from arrival to the first token; ``None`` without one.
        latency_s: seconds from arrival to the end.
        retractions: how often it lost its memory to others and was resumed.
        error: what made it fail.
    """

    rid: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    first_logits: npt.NDArray[np.float32] | None
    ttft_s: float | None
    latency_s: float
    retractions: int
    error: Exception | None = None


class LiveRequest:
    """The scheduler's record of a request; satisfies `uhrc_core.Request`.

    Attributes:
        request: as the caller gave it.
        token_ids: prompt and output so far; only appended to.
        prompt_len: tokens of the prompt.
        decoding: whether all its tokens but the last are computed, so that a decode step serves it.
        cached_tokens: the hit at its first admission; ``None`` before.
        retractions: how often it was retracted.
        finish_reason, error: set when it leaves.
    """

    __slots__ = (
        "cached_tokens",
        "decoding",
        "error",
        "finish_reason",
        "prompt_len",
        "request",
        "retractions",
        "rid",
        "token_ids",
    )

    def __init__(self, request: Request, rid: str) -> None:
        self.request = request
        self.rid = rid
        self.token_ids = [int(token) for token in request.token_ids]
        self.prompt_len = len(self.token_ids)
        self.decoding = False
        self.cached_tokens: int | None = None
        self.retractions = 0
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None

    @property
    def extra_key(self) -> ExtraKey:
        return self.request.extra_key

    @property
    def dp_rank(self) -> int:
        return 0

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def output(self) -> list[int]:
        """The tokens generated so far, a copy."""
        return self.token_ids[self.prompt_len :]

    @property
    def max_pool_len(self) -> int:
        """The most tokens it can hold in the pool: the last one it generates is never computed."""
        return self.prompt_len + self.request.max_new_tokens - 1

    def reason_to_stop(self) -> FinishReason | None:
        """Why the token generated last ends the request, if it does."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) - self.prompt_len >= self.request.max_new_tokens:
            return FinishReason.LENGTH
        return None


def check_request(request: Request, vocab_size: int) -> None:
    """Refuse a request whose fields make no sense, naming the first such field and its value.

    Raises:
        InvalidRequestError: nothing was changed.
    """
    _check_tokens(request, vocab_size)
    _check_integers(request)
    if not _is_number(request.temperature) or not 0 <= request.temperature < math.inf:
        raise InvalidRequestError(f"temperature: {request.temperature!r} is not a number >= 0")
    if not _is_number(request.top_p) or not 0 < request.top_p <= 1:
        raise InvalidRequestError(f"top_p: {request.top_p!r} is not a number in (0, 1]")
    for token in request.stop_token_ids:
        if not _is_int(token):
            raise InvalidRequestError(f"stop_token_ids: {token!r} is not an integer")
    if not isinstance(request.rid, str):
        raise InvalidRequestError(f"rid: {request.rid!r} is not a string")
    try:
        RadixKey([], request.extra_key)
    except InvalidKeyError as error:
        raise InvalidRequestError(str(error)) from error


def _check_tokens(request: Request, vocab_size: int) -> None:
    tokens = np.asarray(request.token_ids)
    if tokens.ndim != 1 or not tokens.size:
        raise InvalidRequestError(
            f"token_ids: shape {list(tokens.shape)}; need at least one token, shape [n]"
        )
    if tokens.dtype.kind not in "iu":
        raise InvalidRequestError(f"token_ids: dtype {tokens.dtype}; need integers")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequestError(f"token_ids: id {bad} is not in the vocabulary [0, {vocab_size})")


def _check_integers(request: Request) -> None:
    for name, value, least, limit in (
        ("max_new_tokens", request.max_new_tokens, 1, 2**31),
        ("top_k", request.top_k, 0, 2**31),
        ("seed", request.seed, 0, 2**32),
        ("priority", request.priority, -math.inf, math.inf),
    ):
        if not _is_int(value) or not least <= value < limit:
            raise InvalidRequestError(f"{name}: {value!r} is not an integer in [{least}, {limit})")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, (float, np.floating))
