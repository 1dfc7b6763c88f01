"""The decode engine: requests in, chunks of tokens out, one step at a time.

In:    requests, cancellations, a threshold that may change between steps.
Out:   for every sequence chunks of tokens and text, the last of which says how it ended.
Never: runs by itself (see `engine_worker`), takes a token back, stops because of one request.

A step is: plan, pack, run, walk. A sequence feeds the tokens it has not fed yet, behind them its unverified drafts,
behind them masks; the logits at the last token are autoregressive, those at the masks look ahead.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mars_ray.engine.chunk import Chunk, Finished, FinishReason, TokenLogprobs
from mars_ray.engine.core.limits import resolve_limits
from mars_ray.engine.execution.model_runner import Runner, Window
from mars_ray.engine.execution.packer import Packer
from mars_ray.engine.grammar.matcher import Grammars
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.slots import KVRows
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import LOSSLESS, Acceptance, Request
from mars_ray.engine.sampling.commit import advance, picks_of, record
from mars_ray.engine.sampling.proposals import Proposals, logprobs_of, propose_all
from mars_ray.engine.sampling.verify import walk
from mars_ray.engine.scheduling.detokenizer import TextStream
from mars_ray.engine.scheduling.scheduler import Feed, Scheduler
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.service_class import check_classes
from mars_ray.engine.stats.block_choice import BlockChoice
from mars_ray.engine.stats.latencies import Recent
from mars_ray.engine.stats.profile import Profile
from mars_ray.engine.stats.state import ClassState, EngineState
from mars_ray.engine.stats.step_time import StepTimeFit, Work
from mars_ray.errors import ConfigError, MarsRayError, RequestError, StepError
from mars_ray.model.checkpoint import Checkpoint

DEFAULTS = EngineOptions()

BLOCK_WITHOUT_CARD = 8
"""Block of a checkpoint whose card does not say what it was trained for."""

AUDIT_EVERY = 16
"""Every so many steps the tokens accepted at masks are compared with what the model says one forward later."""


@dataclass(slots=True)
class _Counts:
    """Of one class of service, since the engine started (see `ClassState`)."""

    arrived: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    tokens: int = 0


class Engine:
    """Decodes with the network of `checkpoint`, whose attention it replaces. Not thread-safe.

    Raises `ModelError` for a network it cannot run and `ConfigError` for sizes it cannot have.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions = DEFAULTS,
        *,
        clock: Callable[[], float] = time.perf_counter,
        new_seed: Callable[[], int] | None = None,
    ) -> None:
        network = checkpoint.network
        self._checkpoint, self._clock = checkpoint, clock
        self._new_seed = new_seed or (lambda: random.getrandbits(62))
        if options.prefill_tokens < 1:
            raise ConfigError(f"prefill_tokens is {options.prefill_tokens}; it must be at least 1.")
        self.limits = resolve_limits(
            network.config,
            network.dtype,
            network.device,
            rows=options.rows,
            kv_tokens=options.kv_tokens,
            queue=options.queue,
            request_tokens=options.request_tokens,
        )
        limits = self.limits
        check_classes(options.classes)
        self._rows = KVRows(tokens=limits.kv_tokens, rows_max=limits.rows, longest=limits.positions)
        self._cache = SlotKVCache(network.config, network.dtype, network.device)
        self._packer = Packer(checkpoint.mask_id, limits.positions, network.device)
        self._runner = Runner(network, self._cache, mask_id=checkpoint.mask_id, compiled=options.compiled)
        self._scheduler = Scheduler(
            self._rows,
            classes=options.classes,
            queue_max=options.queue,
            prefill_tokens=options.prefill_tokens,
            clock=clock,
        )
        self._grammars = Grammars(checkpoint, limits.vocabulary)
        self._requests: dict[str, list[Sequence]] = {}
        self._cancelled: list[Chunk] = []
        self._ended: list[Sequence] = []
        card = checkpoint.card
        self.block = (card and card.block) or BLOCK_WITHOUT_CARD
        """Tokens proposed per forward at most, where a request does not say."""
        self.threshold_changes = 0
        """How often the threshold took another value."""
        self._thresholds = {each.name: options.threshold for each in options.classes}
        self.set_thresholds(self._thresholds)  # checked there
        self._counts = {each.name: _Counts() for each in options.classes}
        self._ttft_s, self._itl_s = Recent(), Recent()
        calibration = card.calibration if card else ()
        self.profile = Profile(
            self.block, {each.threshold: (each.tokens_per_forward, each.agreement) for each in calibration}
        )
        self.step_time = StepTimeFit()
        self._blocks = BlockChoice(self.profile, self.step_time, self.block)
        self._steps = self._kv_tokens = 0
        self._ended_s: float | None = None
        """When the last step ended, if there was more to do then."""

    def set_thresholds(self, thresholds: Mapping[str, float]) -> None:
        """Set the probability a token ahead needs, by class, for requests that name no threshold; between steps.

        Raises `ConfigError` for an unknown class or a value out of range, and then changes nothing.
        """
        for name, value in thresholds.items():
            if name not in self._thresholds:
                raise ConfigError(f"there is no class {name!r}; there are {', '.join(self._thresholds)}.")
            if not 0 <= value <= 1:
                raise ConfigError(f"threshold is {value}; it must be from 0 to 1.")
        self.threshold_changes += sum(value != self._thresholds[name] for name, value in thresholds.items())
        self._thresholds |= thresholds

    @property
    def running(self) -> int:
        """Sequences that have a row."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._scheduler.waiting)

    @property
    def preemptions(self) -> int:
        """Sequences that gave their row back so far, to be computed again."""
        return self._scheduler.preemptions

    def state(self) -> EngineState:
        """Return what an operator, or who decides about thresholds, should know of the engine now."""
        now_s = self._clock()
        running = Counter(each.service_class for each in self._scheduler.running)
        return EngineState(
            rows=self.limits.rows,
            classes=tuple(
                ClassState(
                    name=name,
                    threshold=self._thresholds[name],
                    running=running[name],
                    waiting=self._scheduler.waiting.of(name),
                    arrived=counts.arrived,
                    prompt_tokens=counts.prompt_tokens,
                    ended=counts.ended,
                    tokens=counts.tokens,
                )
                for name, counts in self._counts.items()
            ),
            tokens_running=sum(each.generated for each in self._scheduler.running),
            kv_use=self._rows.used_tokens / self.limits.kv_tokens,
            kv_tokens=self._kv_tokens,
            preemptions=self.preemptions,
            threshold_changes=self.threshold_changes,
            block=self._blocks.chosen,
            profile=self.profile.points(),
            step_time=self.step_time.model,
            ttft_p95_s=self._ttft_s.p95(now_s),
            itl_p95_s=self._itl_s.p95(now_s),
        )

    @property
    def busy(self) -> bool:
        """Whether a step has something to do or to tell."""
        return bool(self._requests or self._cancelled)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` when it cannot be served, `QueueFullError` when not now."""
        self.limits.check(request)
        if request.id in self._requests:
            raise RequestError(f"a request with the id {request.id!r} is already here; ids must differ.")
        counts = self._counts.get(request.service_class)
        if counts is None:
            known = ", ".join(self._counts)
            raise RequestError(f"service_class is {request.service_class!r}; this engine has {known}.")
        sampling = request.sampling
        limit = min(sampling.max_tokens, self.limits.positions - len(request.prompt))
        stop_ids = sampling.stop_ids | (frozenset() if sampling.ignore_eos else self._checkpoint.stop_ids)
        matchers = [
            None if sampling.grammar is None else self._grammars.matcher(sampling.grammar, stop_ids)
            for _ in range(sampling.n)
        ]
        counts.arrived += sampling.n
        counts.prompt_tokens += len(request.prompt)  # the others of its n find it in the cache
        seed = self._new_seed() if sampling.seed is None else sampling.seed
        sequences = [
            Sequence(
                request=request,
                index=index,
                seed=(seed + index) % 2**64,
                limit=limit,
                stop_ids=stop_ids,
                text=TextStream(self._checkpoint.tokenizer, sampling.stop),
                tokens=list(request.prompt),
                matcher=matcher,
                drafts=matcher.take_forced(limit) if matcher else [],  # read with the prompt
            )
            for index, matcher in enumerate(matchers)
        ]
        self._scheduler.add(sequences)
        self._requests[request.id] = sequences

    def cancel(self, request_id: str) -> None:
        """End a request at once; unknown ids are let pass, for a request may have ended in the meantime."""
        for sequence in list(self._requests.get(request_id, ())):
            self._cancelled.append(self._last(sequence, "cancelled"))
        self._release_ended()

    def step(self) -> list[Chunk]:
        """Run one forward and return what it gave to whom; also the last chunks of what was cancelled before."""
        started_s = self._clock()
        chunks, self._cancelled = self._cancelled, []
        thresholds = tuple(self._thresholds.values())
        self._blocks.next_step(self._scheduler.running, self._acceptance, thresholds, self._kv_tokens)
        try:
            feeds = self._scheduler.plan(self._masks_for)
            self._apply_cache_operations()
        except Exception as error:  # memory for a wider cache: which request it was for cannot be told
            return chunks + self._start_over(error)
        if feeds:
            self._steps += 1
            chunks += self._run(feeds, audit=self._steps % AUDIT_EVERY == 0)
            self._release_ended()
            decoding = [feed for feed in feeds if feed.short]
            work = Work(
                rows=len(decoding),
                positions=sum(feed.length for feed in decoding),
                kv_tokens=self._kv_tokens,
                prompt_tokens=sum(feed.length for feed in feeds if not feed.short),
            )
            # What lies between steps, such as sending chunks, is part of what a step takes.
            since_s = started_s if self._ended_s is None else self._ended_s
            self._ended_s = self._clock()
            self.step_time.observe(work, self._ended_s - since_s)
        if not self.busy:
            self._ended_s = None
        return chunks

    def clear_cache(self) -> None:
        """Forget what ended sequences left behind. Raises `ConfigError` while sequences run."""
        if self.running:
            raise ConfigError(f"{self.running} sequences run; the cache can be cleared between them only.")
        self._rows.clear()

    def wait_until_compiled(self) -> None:
        """Wait until what can be compiled is; without it the first steps are eager."""
        self._runner.wait_until_compiled()

    def close(self) -> None:
        """Stop compiling. Requests still here get no further chunk."""
        self._runner.close()

    def _masks_for(self, sequence: Sequence) -> int:
        acceptance = self._acceptance(sequence)
        if acceptance is None or (sequence.drafts and sequence.drafts[-1] in sequence.stop_ids):
            return 0  # nothing to look at, or the end in sight
        block = sequence.request.decode.block or self._blocks.block(sequence, acceptance)
        return max(0, min(block, sequence.limit - sequence.generated - len(sequence.drafts)) - 1)

    def _acceptance(self, sequence: Sequence) -> Acceptance | None:
        return sequence.request.decode.acceptance(self._thresholds[sequence.service_class])

    def _apply_cache_operations(self) -> None:
        if self._rows.operations:
            self._cache.apply(self._rows.operations)
            self._rows.operations.clear()

    def _release_ended(self) -> None:
        """Free the rows of sequences that ended, once every sequence of the step has noted what is in its own."""
        for sequence in self._ended:
            self._scheduler.remove(sequence)
        self._ended.clear()

    def _start_over(self, error: Exception) -> list[Chunk]:
        """Fail what is running and begin with an empty cache; what waits is served from there."""
        chunks = [self._fail(sequence, error) for sequence in self._scheduler.running]
        self._release_ended()
        self.clear_cache()
        self._cache.resize(0, 0)
        return chunks

    def _run(self, feeds: list[Feed], audit: bool) -> list[Chunk]:
        """Run one forward over `feeds` and commit what it gave; where it fails, find those it fails for."""
        try:
            packed, slices = self._packer.pack(feeds, self._rows.active, audit=audit)
            window = self._runner.run(packed)
            proposed = propose_all(feeds, [picks_of(*each) for each in zip(feeds, slices, strict=True)], window)
        except Exception as error:  # memory, or the model's own code: the others must go on
            if len(feeds) == 1:
                return [self._fail(feeds[0].sequence, error)]
            # A forward changes nothing but keys and values, which the next one writes again.
            return [chunk for feed in feeds for chunk in self._run([feed], audit)]
        self._kv_tokens = packed.kv_tokens
        chunks = []
        for feed, where, proposals in zip(feeds, slices, proposed, strict=True):
            try:
                if chunk := self._commit(feed, where, proposals, window):
                    chunks.append(chunk)
            except Exception as error:  # what works on one sequence alone fails it alone
                chunks.append(self._fail(feed.sequence, error))
        return chunks

    def _commit(self, feed: Feed, where: slice, proposals: Proposals, window: Window) -> Chunk | None:
        """Advance one sequence by what the forward gave; None while its prompt is being read."""
        sequence = feed.sequence
        if not feed.complete:
            sequence.cached += feed.count
            return None
        acceptance = self._acceptance(sequence)
        needs = acceptance or LOSSLESS  # without masks there is nothing to accept
        room = sequence.limit - sequence.generated
        walked = walk(proposals, sequence.drafts, needs.threshold, needs.metric, sequence.stop_ids, room)
        record(self.profile, feed, where, walked, window, acceptance)
        emitted = advance(sequence, walked, verified=needs.verified)
        if emitted.tokens:
            self._time(sequence, len(emitted.tokens))
        logprobs: tuple[TokenLogprobs, ...] = ()
        if (count := sequence.request.sampling.logprobs) is not None:
            logprobs = logprobs_of(emitted, picks_of(feed, where).start, count, window)
        return Chunk(
            request_id=sequence.request.id,
            index=sequence.index,
            tokens=emitted.tokens,
            pieces=emitted.pieces,
            logprobs=logprobs,
            threshold=needs.quality,
            masks=feed.masks,
            finished=emitted.reason and self._finish(sequence, emitted.reason),
        )

    def _time(self, sequence: Sequence, tokens: int) -> None:
        now_s = self._clock()
        if sequence.said_s is None:
            self._ttft_s.add(now_s, now_s - sequence.added_s)
        else:
            self._itl_s.add(now_s, (now_s - sequence.said_s) / tokens)
        sequence.said_s = now_s

    def _finish(self, sequence: Sequence, reason: FinishReason, error: MarsRayError | None = None) -> Finished:
        self._ended.append(sequence)
        if sequence.started_s is not None:
            self._counts[sequence.service_class].ended += 1
            self._counts[sequence.service_class].tokens += sequence.generated
        siblings = self._requests[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.id]
        return Finished(
            reason=reason,
            prompt_tokens=sequence.prompt_length,
            cached_tokens=sequence.prefix_hit,
            tokens=sequence.generated,
            forwards=sequence.forwards,
            queued_s=(self._clock() if sequence.started_s is None else sequence.started_s) - sequence.added_s,
            error=error,
        )

    def _fail(self, sequence: Sequence, error: Exception) -> Chunk:
        reason = f"decoding failed: {type(error).__name__}: {error}".rstrip(". ")
        return self._last(sequence, "error", StepError(f"{reason}. The engine serves other requests."))

    def _last(self, sequence: Sequence, reason: FinishReason, error: MarsRayError | None = None) -> Chunk:
        """Return the chunk of a sequence that ends between its tokens."""
        finished = self._finish(sequence, reason, error)
        return Chunk(
            sequence.request.id, sequence.index, tokens=(), pieces=(sequence.text.finish(),), finished=finished
        )
