"""Continuous batching: who runs in the next step, who waits, who gives way.

Each step is a prefill step (one chunk of the prompt of up to ``prefill_rows`` requests) or a decode
step (one token of every request past its prompt). When both are possible they alternate, so that a
long prompt delays a running answer by at most one chunk at a time.

1. **Order.** First come first served; nobody overtakes the head of the queue, so nobody starves.
2. **Admission**, only when a prefill row is free, so that the match sees everything published so
   far: a request behind another one with the same prompt finds that prompt in the tree. It is
   admitted when the pools cover it by the headroom rule (`uhrc_core.scheduling`), else it waits.
   While a running prefill is computing a prefix that the head shares, the head waits for it.
3. **Retraction.** A running request that cannot get a page makes the latest admitted one give up
   its memory and go back to the head of the queue; what that one computed stays in the tree until
   evicted. The earliest admitted request is never retracted for another, so it always finishes.
4. **Failure.** A request alone in the engine that still cannot get a page fails; it does not loop.

Decisions depend on the calls made and nothing else: no clock, no hashing order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from uhrc_core.cache.key import RadixKey
from uhrc_core.cache.lifecycle import RequestLifecycle
from uhrc_core.cache.params import MatchResult, MissReason
from uhrc_core.scheduling import TokenNeed, admission_tokens, next_chunk_end
from uhrc_engine.batch import Batch, BatchRow, StepKind
from uhrc_engine.request import FinishReason, InvalidRequestError, LiveRequest, OutOfPagesError

FEATURES: frozenset[str] = frozenset()
"""What these steps do of the features in `uhrc_core.combination`: nothing. No token is drafted,
and rows of prefill and decode are never mixed."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold.

    Attributes:
        chunk_size: prompt tokens per row of a prefill step; the grid that prompts are cut on.
        prefill_rows: requests whose prompts are computed at the same time.
        max_running: requests admitted at the same time = rows of a decode step.
        headroom_tokens: tokens kept back at an admission for each running request, and for the new
            one, beyond those it has; >= 1.
    """

    chunk_size: int
    prefill_rows: int = 1
    max_running: int = 8
    headroom_tokens: int = 64


class Scheduler:
    """Owns the queue and the running set; the cache owns the memory.

    The caller's loop: `next_batch`, copy states, `cloned`, run it, `dispatched`, sample, `commit`,
    `take_finished`.
    """

    def __init__(self, cache: RequestLifecycle, limits: SchedulerLimits) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []
        self.num_retractions = 0
        self._finished: list[LiveRequest] = []
        self._by_rid: dict[str, LiveRequest] = {}
        self._last_kind = StepKind.DECODE
        # The head was refused, and nothing has happened since that could have made room for it.
        self._head_blocked = False

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or has finished without being taken."""
        return bool(self.waiting or self.running or self._finished)

    def add(self, req: LiveRequest) -> None:
        """Queue a request.

        Raises:
            RequestTooLargeError: it could not run even alone; the message shows the sum.
            InvalidRequestError: its rid is in flight.
        """
        if req.rid in self._by_rid:
            raise InvalidRequestError(f"rid: {req.rid!r} is in flight; rids must be unique")
        self.cache.check_fits(req.max_pool_len)
        self._by_rid[req.rid] = req
        self.waiting.append(req)

    def abort(self, rid: str) -> bool:
        """End a request wherever it is; it leaves through `take_finished` with what it generated.

        Returns whether it was in flight. Not between `next_batch` and `commit`.
        """
        req = self._by_rid.get(rid)
        if req is None:
            return False
        self._drop(req, FinishReason.ABORT)
        return True

    def fail(self, req: LiveRequest, error: Exception) -> None:
        """End a request in flight because of ``error``; publishes nothing of it."""
        req.error = error
        self._drop(req, FinishReason.ERROR)

    def take_finished(self) -> list[LiveRequest]:
        """The requests that have left since the last call, in that order; each is given once."""
        finished, self._finished = self._finished, []
        return finished

    # -- a step --------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """Decide the next step and take pool indices for its tokens.

        ``None``: nothing can run now; some request may have failed (`take_finished`).
        """
        plans = [(StepKind.PREFILL, self._prefill_rows), (StepKind.DECODE, self._decode_rows)]
        if self._last_kind is StepKind.PREFILL:
            plans.reverse()
        for kind, plan in plans:
            rows = plan()
            if rows:
                self._last_kind = kind
                return Batch(kind, tuple(rows))
        return None

    def cloned(self, batch: Batch) -> None:
        """The state copies that the batch's rows ask for have been dispatched."""
        for row in batch.rows:
            if row.slots is not None and row.slots.clone_src is not None:
                self.cache.started_req(row.request)

    def dispatched(self, batch: Batch) -> None:
        """The forward of ``batch`` has been dispatched: its tokens count, prompts are published."""
        for row in batch.rows:
            self.cache.advance_req(row.request, row.stop - row.start)
            if batch.kind is StepKind.PREFILL:
                self.cache.cache_unfinished_req(row.request)

    def commit(self, batch: Batch, tokens: Sequence[int]) -> None:
        """Append each sampling row's token int (``tokens[i]`` is row i's) and end who is done."""
        for row, token in zip(batch.rows, tokens, strict=True):
            if not row.samples:
                continue
            req = row.request
            req.token_ids.append(int(token))
            req.decoding = True
            reason = req.reason_to_stop()
            if reason is not None:
                self.cache.cache_finished_req(req)
                self.running.remove(req)
                self._leave(req, reason)

    # -- prefill -------------------------------------------------------------------------------

    def _prefill_rows(self) -> list[BatchRow]:
        self._admit()
        rows: list[BatchRow] = []
        for req in self._prefilling()[: self.limits.prefill_rows]:
            if req not in self.running:  # an earlier row retracted it
                continue
            start = self.cache.request_state(req.rid).computed_len
            end = len(req.token_ids)
            cuts = self.cache.cuts(req, start, min(end, start + self.limits.chunk_size))
            stop = next_chunk_end(start, end, self.limits.chunk_size, cuts)
            if self._extend(req, stop - start):
                rows.append(self._row(req, start, stop))
        return rows

    def _prefilling(self) -> list[LiveRequest]:
        return [req for req in self.running if not req.decoding]

    def _admit(self) -> None:
        """Admit from the head of the queue into free prefill rows."""
        while (
            self.waiting
            and not self._head_blocked
            and len(self.running) < self.limits.max_running
            and len(self._prefilling()) < self.limits.prefill_rows
        ):
            req = self.waiting[0]
            match = self.cache.match_req(req)
            if self._prefix_is_coming(req, match):
                return
            match = self.cache.prefetch_req(req, match)
            state = self.cache.admit_req(req, match, self._admission_tokens(req, match.hit_len))
            if state is not None:
                self.waiting.popleft()
                self.running.append(req)
                if req.cached_tokens is None:
                    req.cached_tokens = state.cached_len
            elif self.running:
                self._head_blocked = True
            else:
                self.fail(req, self._out_of_pages(req))

    def _prefix_is_coming(self, req: LiveRequest, match: MatchResult) -> bool:
        """Whether a running prefill will publish more of the request's prompt than it hits now.

        A wait for it ends when that prefill has computed what it shares, at the latest.
        """
        others = self._prefilling()
        if not others or match.miss_reason is MissReason.DISABLED:
            return False
        key = _prompt_key(req)
        for other in others:
            if other.extra_key == req.extra_key:
                shared = key.common_len(_prompt_key(other), 0, len(key))
                # What it has computed it has published, as far as it ever will.
                had = max(match.hit_len, self.cache.request_state(other.rid).computed_len)
                if had < self.cache.publishable_len(other, shared):
                    return True
        return False

    def _admission_tokens(self, req: LiveRequest, hit_len: int) -> int:
        running = [
            TokenNeed(
                self.cache.request_state(r.rid).allocated_len, len(r.token_ids), r.max_pool_len
            )
            for r in self.running
        ]
        new = TokenNeed(hit_len, len(req.token_ids), req.max_pool_len)
        return admission_tokens(new, running, self.limits.headroom_tokens, self.cache.page_size)

    # -- decode --------------------------------------------------------------------------------

    def _decode_rows(self) -> list[BatchRow]:
        rows: list[BatchRow] = []
        for req in [req for req in self.running if req.decoding]:
            # A retraction takes the latest admitted first, so it never hits a row made already.
            if req in self.running and self._extend(req, 1):
                start = self.cache.request_state(req.rid).computed_len
                rows.append(self._row(req, start, start + 1))
        return rows

    # -- memory --------------------------------------------------------------------------------

    def _extend(self, req: LiveRequest, num_tokens: int) -> bool:
        """Pool indices for the request's next tokens, retracting others, the latest first.

        ``False``: the request itself was retracted, or failed because it was alone.
        """
        while self.cache.extend_req(req, num_tokens) is None:
            if len(self.running) == 1:
                self.fail(req, self._out_of_pages(req))
                return False
            victim = self.running[-1]
            self._retract(victim)
            if victim is req:
                return False
        return True

    def _retract(self, req: LiveRequest) -> None:
        self.cache.retract_req(req)
        self.running.remove(req)
        req.decoding = False
        req.retractions += 1
        self.num_retractions += 1
        self.waiting.appendleft(req)
        self._head_blocked = False

    def _row(self, req: LiveRequest, start: int, stop: int) -> BatchRow:
        tables = self.cache.page_tables(req, stop)
        slots = self.cache.state_slots(req, start, stop)
        return BatchRow(req, start, stop, tables, slots, samples=stop == len(req.token_ids))

    def _out_of_pages(self, req: LiveRequest) -> OutOfPagesError:
        return OutOfPagesError(
            f"request {req.rid!r} ({len(req.token_ids)} tokens so far) runs alone and still cannot "
            "get a page: the pool's pages are locked from outside the engine; release those locks"
        )

    # -- leaving -------------------------------------------------------------------------------

    def _drop(self, req: LiveRequest, reason: FinishReason) -> None:
        if req in self.running:
            self.cache.abort_req(req)
            self.running.remove(req)
        else:
            self.waiting.remove(req)
        self._leave(req, reason)

    def _leave(self, req: LiveRequest, reason: FinishReason) -> None:
        req.finish_reason = reason
        del self._by_rid[req.rid]
        self._finished.append(req)
        self._head_blocked = False


def _prompt_key(req: LiveRequest) -> RadixKey:
    """What may match of the request: all its tokens but the last."""
    return RadixKey(req.token_ids[:-1], req.extra_key, req.dp_rank)
