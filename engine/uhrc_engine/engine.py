"""Engine: a model, its pools, a prefix cache and a scheduler, behind `generate` and `stream`.

One step of the engine is one step of the scheduler's loop: decide a batch, dispatch its forward,
publish what it wrote, sample, hand out tokens. Nothing here runs in a thread of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.params import CacheStats
from uhrc_core.kinds import ComponentType
from uhrc_engine.assembly import EngineParts, as_config, build_parts, default_config
from uhrc_engine.batch import Batch, BatchRow, StepKind
from uhrc_engine.config import EngineTable
from uhrc_engine.models.contract import StepRow, make_step_inputs
from uhrc_engine.request import (
    Completion,
    EngineBusyError,
    LiveRequest,
    Request,
    check_request,
)
from uhrc_engine.sampling import SamplingParams, sample
from uhrc_engine.scheduler import Scheduler
from uhrc_engine.weights import Pretrained, load_model
from uhrc_engine.weights.smollm2 import fetch_smollm2


class TokenEvent(NamedTuple):
    """A request's next generated token."""

    rid: str
    token_id: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave: tokens in row order, then the requests that left."""

    events: tuple[TokenEvent, ...]
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since construction, and what is in flight now.

    Attributes:
        prefill_steps, decode_steps: steps run.
        computed_tokens: prompt tokens that went through a prefill step, recomputation included.
        output_tokens: tokens generated.
        cow_clones: recurrent states copied for a hit.
        slots_peak: most recurrent slots in use at once, the tree's included; 0 without any.
        window_tokens_peak: as many tokens of the window pool.
        retractions: how often a request lost its memory to others.
        running, waiting: requests now.
        compiled_programs: step shapes compiled.
        cache: the cache's own totals.
    """

    prefill_steps: int
    decode_steps: int
    computed_tokens: int
    output_tokens: int
    cow_clones: int
    slots_peak: int
    window_tokens_peak: int
    retractions: int
    running: int
    waiting: int
    compiled_programs: int
    cache: CacheStats


@dataclass(slots=True)
class _Counters:
    """What the engine counts as it goes; see `EngineStats`."""

    prefill_steps: int = 0
    decode_steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    cow_clones: int = 0
    slots_peak: int = 0
    window_tokens_peak: int = 0


@dataclass(slots=True)
class _Progress:
    """What the engine reports about a request beside its tokens; the scheduler never sees it."""

    arrived_s: float
    first_token_s: float | None = None
    first_logits: npt.NDArray[np.float32] | None = None


class Engine:
    """Generates text for many requests at once, reusing the prefixes they share.

    Make one with `from_pretrained`, or with `EngineParts` of your own. Use it from one thread.

    Attributes:
        cache: the prefix cache; reading it is safe between steps.
        vocab_size: token ids are below this.
        max_context_len: tokens one request may hold.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._runner = parts.runner
        self.cache: BasePrefixCache = parts.cache
        self.vocab_size = parts.runner.model.vocab_size
        self.max_context_len = parts.cache.req_to_token.max_context_len
        self._scheduler = Scheduler(parts.cache, parts.limits)
        self._progress: dict[str, _Progress] = {}
        self._counters = _Counters()
        self._rid_counter = itertools.count()

    @classmethod
    def from_pretrained(
        cls, path: str | Path, cache_config: Any = None, overrides: Iterable[str] = ()
    ) -> Engine:
        """Load a Hugging Face directory or a GGUF file and assemble a cache for it.

        Args:
            path: the model; "smollm2" is SmolLM2-135M-Instruct, downloaded once.
            cache_config: a `uhrc_core.Config`, the path of a TOML file, or a mapping of the tables
                such a file has; ``None``: the components and sizes that suit the model
                (`uhrc_engine.assembly.default_config`).
            overrides: ``"cache.page_size=16"``, applied to a file, a mapping or the default.

        Raises:
            WeightsError: the checkpoint cannot be loaded.
            ConfigError, PluginError: the cache cannot be assembled for this model.
        """
        overrides = tuple(overrides)
        config = as_config({} if cache_config is None else cache_config, overrides)
        path = fetch_smollm2() if path == "smollm2" else path
        pretrained = load_model(path, config.table(EngineTable))
        if cache_config is None:
            config = default_config(pretrained, overrides)
        return cls(build_parts(pretrained, config))

    @classmethod
    def from_model(cls, pretrained: Pretrained, cache_config: Any = None) -> Engine:
        """`from_pretrained` for a model in memory; several engines can share its params."""
        if cache_config is None:
            cache_config = default_config(pretrained)
        return cls(build_parts(pretrained, as_config(cache_config)))

    def warmup(self) -> None:
        """Compile everything a step can need. Afterwards `compiled_programs` no longer grows."""
        self._runner.warmup()
        for rows in sorted({bucket.rows for bucket in self._runner.buckets.all}):
            logits = jax.numpy.zeros((rows, self.vocab_size), jax.numpy.float32)
            for temperature in (0.0, 1.0):
                sample(logits, [SamplingParams(temperature)], [0])

    # -- many requests at once -----------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run the requests to their end; completions in the order given.

        A request that fails on the way has ``finish_reason == "error"`` and carries the error. When
        this call is interrupted, all its requests are aborted.

        Raises:
            InvalidRequestError, RequestTooLargeError: one of them can never run; none was started.
            EngineBusyError: other requests are in flight.
        """
        rids = self._add_all(requests)
        done: dict[str, Completion] = {}
        try:
            while len(done) < len(rids):
                done |= {completion.rid: completion for completion in self.step().completions}
        finally:
            self._abort_all(rids)
        return [done[rid] for rid in rids]

    def stream(self, requests: Sequence[Request]) -> Iterator[TokenEvent]:
        """Run the requests and give out each token as it is sampled.

        Nothing happens before the first token is asked for; closing the iterator aborts what is
        left.

        Raises:
            As `generate`; and the error of a request that fails on the way.
        """
        rids = self._add_all(requests)
        try:
            left = len(rids)
            while left:
                output = self.step()
                yield from output.events
                left -= len(output.completions)
                for completion in output.completions:
                    if completion.error is not None:
                        raise completion.error
        finally:
            self._abort_all(rids)

    def _add_all(self, requests: Sequence[Request]) -> list[str]:
        if self._scheduler.has_work:
            raise EngineBusyError(
                "generate and stream need the engine to themselves; finish or abort what is in "
                "flight, or drive all requests with add_request and step"
            )
        rids: list[str] = []
        try:
            for request in requests:
                rids.append(self.add_request(request))
        except Exception:
            self._abort_all(rids)
            raise
        return rids

    def _abort_all(self, rids: Iterable[str]) -> None:
        """Abort those still in flight; forget them and those that ended without being reported."""
        for rid in rids:
            self.abort(rid)
        for req in self._scheduler.take_finished():
            del self._progress[req.rid]

    # -- step by step, for servers ---------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do or to report."""
        return self._scheduler.has_work

    def add_request(self, request: Request) -> str:
        """Queue a request and return its rid.

        Raises:
            InvalidRequestError: a field makes no sense.
            RequestTooLargeError: it could not run even alone; the message shows the sum.
            In both cases the engine is unchanged.
        """
        check_request(request, self.vocab_size)
        rid = request.rid or self._fresh_rid()
        self._scheduler.add(LiveRequest(request, rid))
        self._progress[rid] = _Progress(time.perf_counter())
        return rid

    def abort(self, rid: str) -> bool:
        """End a request wherever it is; the next `step` reports it. Returns whether it ran."""
        return self._scheduler.abort(rid)

    def step(self) -> StepOutput:
        """Run one batch, if there is work, and report what came of it.

        An exception from the forward ends the requests of that batch (reported by the next step)
        and is raised. After a failed device computation the pools are lost: make a new engine.
        """
        batch = self._scheduler.next_batch()
        events = () if batch is None else self._run(batch)
        completions = tuple(map(self._complete, self._scheduler.take_finished()))
        return StepOutput(events, completions)

    def stats(self) -> EngineStats:
        """Totals so far; a copy."""
        return EngineStats(
            **asdict(self._counters),
            retractions=self._scheduler.num_retractions,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            compiled_programs=self._runner.compile_count,
            cache=self.cache.stats(),
        )

    # -- one batch -------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> tuple[TokenEvent, ...]:
        try:
            logits = self._forward(batch)
        except Exception as error:
            for row in batch.rows:
                self._scheduler.fail(row.request, error)
            raise
        self._scheduler.dispatched(batch)
        self._count(batch)
        if not batch.samples:
            return ()
        params = [_sampling_params(row.request.request) for row in batch.rows]
        tokens = sample(logits, params, [row.stop for row in batch.rows])
        self._note_first_tokens(batch, logits)
        self._scheduler.commit(batch, tokens.tolist())
        return tuple(
            TokenEvent(row.request.rid, int(token))
            for row, token in zip(batch.rows, tokens, strict=True)
            if row.samples
        )

    def _forward(self, batch: Batch) -> jax.Array:
        """Dispatch the batch; logits float32[>= rows, vocab] on the device."""
        if batch.clones:
            self._runner.copy_states(batch.clones)
            self._scheduler.cloned(batch)
            self._counters.cow_clones += len(batch.clones)
        components = self._runner.model.paged_components
        rows = [_step_row(row, components) for row in batch.rows]
        width = max(row.stop - row.start for row in batch.rows)
        if batch.kind is StepKind.PREFILL:
            width = max(width, 2)  # a width of 1 would be served by a decode bucket
        inputs = make_step_inputs(
            rows, width=width, max_pages=self._runner.max_pages, page_size=self.cache.page_size
        )
        return self._runner.step(inputs)

    def _note_first_tokens(self, batch: Batch, logits: jax.Array) -> None:
        now = time.perf_counter()
        for i, row in enumerate(batch.rows):
            progress = self._progress[row.request.rid]
            if row.samples and progress.first_token_s is None:
                progress.first_token_s = now
                progress.first_logits = np.asarray(logits)[i].copy()

    def _count(self, batch: Batch) -> None:
        slots, tokens = (
            self._in_use(kind) for kind in (ComponentType.RECURRENT, ComponentType.SWA)
        )
        self._counters.slots_peak = max(self._counters.slots_peak, slots)
        self._counters.window_tokens_peak = max(self._counters.window_tokens_peak, tokens)
        if batch.kind is StepKind.PREFILL:
            self._counters.prefill_steps += 1
            self._counters.computed_tokens += batch.num_tokens
        else:
            self._counters.decode_steps += 1
        self._counters.output_tokens += sum(row.samples for row in batch.rows)

    def _in_use(self, kind: ComponentType) -> int:
        """Units of the kind's pool that a request or the tree holds; 0 where there is no pool."""
        pools = [c.allocator for c in self.cache.components if c.kind is kind]
        return sum(pool.capacity - pool.available_size(0) for pool in pools)

    def _complete(self, req: LiveRequest) -> Completion:
        progress = self._progress.pop(req.rid)
        first = progress.first_token_s
        assert req.finish_reason is not None
        return Completion(
            rid=req.rid,
            token_ids=req.output,
            finish_reason=req.finish_reason,
            prompt_tokens=req.prompt_len,
            cached_tokens=req.cached_tokens or 0,
            first_logits=progress.first_logits,
            ttft_s=None if first is None else first - progress.arrived_s,
            latency_s=time.perf_counter() - progress.arrived_s,
            retractions=req.retractions,
            error=req.error,
        )

    def _fresh_rid(self) -> str:
        return next(rid for i in self._rid_counter if (rid := f"request-{i}") not in self._progress)


def _step_row(row: BatchRow, components: Sequence[ComponentType]) -> StepRow:
    """With the page tables of these components, which are those the model's layers read."""
    page_tables = {kind: row.page_tables[kind] for kind in components}
    if row.slots is None:
        return StepRow(row.token_ids, row.start, page_tables)
    return StepRow(
        row.token_ids,
        row.start,
        page_tables,
        state_slot=row.slots.running,
        track_slot=row.slots.track,
    )


def _sampling_params(request: Request) -> SamplingParams:
    return SamplingParams(request.temperature, request.top_p, request.top_k, request.seed)
