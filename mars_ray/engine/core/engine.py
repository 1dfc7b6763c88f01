"""The decode engine: requests in, chunks of tokens out, one step at a time.

A step is: schedule, run, verify, commit. Of each scheduled sequence the tokens that the network has not seen yet go
through it, behind them unverified drafts, behind them masks; the logits at the last token are autoregressive, those at
the masks look ahead.

The engine does not run by itself (see `process/worker`), takes no token back, and does not stop because of one request.
"""

import random
import time
from collections import abc

from mars_ray.engine.chunk import Chunk, Finished, FinishReason, TokenLogprobs
from mars_ray.engine.core.adapters import Adapters, AdaptersByName
from mars_ray.engine.core.class_thresholds import ClassThresholds
from mars_ray.engine.core.limits import resolve_limits
from mars_ray.engine.core.new_sequences import new_sequences
from mars_ray.engine.execution.choose_runner import choose_runner
from mars_ray.engine.execution.input_packer import InputPacker
from mars_ray.engine.execution.model_runner import ForwardOutput
from mars_ray.engine.grammar.matcher import Grammars
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.slot_allocator import SlotAllocator
from mars_ray.engine.options import DEFAULT_OPTIONS, EngineOptions
from mars_ray.engine.request import LOSSLESS, Request
from mars_ray.engine.sampling.commit import advance, audits_of, picks_of, record
from mars_ray.engine.sampling.proposals import logprobs_of, propose_all
from mars_ray.engine.sampling.verify import Proposals, verify
from mars_ray.engine.scheduling.scheduler import Masks, ScheduledSequence, Scheduler
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.service_class import check_classes
from mars_ray.engine.stats.block_choice import BlockChoice
from mars_ray.engine.stats.engine_stats import EngineStats
from mars_ray.engine.stats.profile import Profile
from mars_ray.engine.stats.state import EngineState
from mars_ray.engine.stats.step_time import StepTimeFit
from mars_ray.errors import ConfigError, GrammarError, MarsRayError, RequestError, StepError
from mars_ray.model.checkpoint import Checkpoint

AUDIT_EVERY = 16
"""Every so many steps the tokens accepted at masks are compared with what the model says one forward later."""


class Engine:
    """Decodes with the network of `checkpoint`, whose attention it may replace. Not thread-safe.

    The masks of a request, and they alone, are decoded with the adapter it names; see `core/adapters`.
    With `consume` the network gives its weights up where the engine packs copies of them: it cannot run afterwards.
    Raises `ModelError` for a network it cannot run and `ConfigError` for sizes it cannot have.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions = DEFAULT_OPTIONS,
        *,
        adapters: AdaptersByName | None = None,
        consume: bool = False,
        clock: abc.Callable[[], float] = time.perf_counter,
        new_seed: abc.Callable[[], int] | None = None,
    ) -> None:
        network = checkpoint.network
        self._checkpoint, self._clock = checkpoint, clock
        self._adapters = Adapters(adapters or {}, checkpoint.card)
        self._new_seed = new_seed or (lambda: random.getrandbits(62))
        self.limits = limits = resolve_limits(network.config, network.dtype, network.device, options)
        check_classes(options.classes)
        self._thresholds = ClassThresholds({each.name: options.threshold for each in options.classes})
        self._slots = SlotAllocator(
            max_tokens=limits.max_kv_tokens, max_slots=limits.max_num_seqs, max_model_len=limits.max_model_len
        )
        self._scheduler = Scheduler(
            self._slots,
            classes=options.classes,
            max_waiting_seqs=options.max_waiting_seqs,
            max_prefill_tokens=options.max_prefill_tokens,
            clock=clock,
        )
        self._cache = SlotKVCache(network.config, network.dtype, network.device)
        self._packer = InputPacker(checkpoint.mask_id, limits.max_model_len, network.device, self._adapters.of)
        self._runner, self.kernels = choose_runner(
            network, self._cache, checkpoint.mask_id, options, consume=consume, adapters=self._adapters.loras
        )
        """What runs a forward, and its description for reports."""
        self.grammars = Grammars(checkpoint, limits.vocab_size)
        """Grammars that requests may name; those prepared are not compiled in `add`."""
        self.block = self._adapters.block
        """Tokens proposed per forward at most, where a request does not say."""
        self.profile = Profile(self.block, self._adapters.calibration)
        self.step_time = StepTimeFit()
        self._blocks = BlockChoice(self.profile, self.step_time, self.block)
        self._stats = EngineStats(self._thresholds.by_class, self.step_time, clock)
        self._requests: dict[str, list[Sequence]] = {}
        """Sequences of each request that have not ended."""
        self._cancelled: list[Chunk] = []
        """Last chunks of what was cancelled since the last step."""
        self._ended: list[Sequence] = []
        """Sequences that ended in this step, whose slots are still to be freed."""

    def set_thresholds(self, thresholds: abc.Mapping[str, float]) -> None:
        """Set the probability a token ahead needs, by class, for requests that name no threshold; between steps.

        Raises `ConfigError` for an unknown class or a value out of range, and then changes nothing.
        """
        self._thresholds.set(thresholds)

    @property
    def running(self) -> int:
        """Sequences that have a slot of the cache."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences in the waiting queue."""
        return len(self._scheduler.waiting)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do or to tell."""
        return bool(self._requests or self._cancelled)

    def state(self) -> EngineState:
        """Return what an operator, or who decides about thresholds, should know of the engine now."""
        return EngineState(
            max_num_seqs=self.limits.max_num_seqs,
            classes=self._stats.class_states(self._scheduler, self._thresholds.by_class),
            tokens_running=sum(sequence.num_output_tokens for sequence in self._scheduler.running),
            kv_cache_usage=self._slots.used_tokens / self.limits.max_kv_tokens,
            kv_tokens=self._stats.kv_tokens,
            steps=self._stats.steps,
            preemptions=self._scheduler.preemptions,
            threshold_changes=self._thresholds.changes,
            block=self._blocks.chosen,
            profile=self.profile.points(),
            step_time=self.step_time.model,
            ttft_p95_s=self._stats.ttft_p95_s(),
            tpot_p95_s=self._stats.tpot_p95_s(),
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` when it cannot be served, `QueueFullError` when not now."""
        self.limits.check(request)
        self._adapters.check(request)
        if request.id in self._requests:
            raise RequestError(f"a request with the id {request.id!r} is already here; ids must differ.")
        if request.service_class not in self._thresholds.by_class:
            known = ", ".join(self._thresholds.by_class)
            raise RequestError(f"service_class is {request.service_class!r}; this engine has {known}.")
        seed = self._new_seed() if request.sampling.seed is None else request.sampling.seed
        sequences = new_sequences(request, seed, self._checkpoint, self.limits, self.grammars)
        self._stats.arrived(request)
        self._scheduler.add(sequences)
        self._requests[request.id] = sequences

    def cancel(self, request_id: str) -> None:
        """End a request at once; unknown ids are let pass, for a request may have ended in the meantime."""
        for sequence in list(self._requests.get(request_id, ())):
            self._cancelled.append(self._cut_short(sequence, "cancelled"))
        self._free_ended()

    def step(self) -> list[Chunk]:
        """Run one forward and return what it gave to whom; also the last chunks of what was cancelled before."""
        self._stats.step_began()
        chunks, self._cancelled = self._cancelled, []
        thresholds = tuple(self._thresholds.by_class.values())
        self._blocks.next_step(self._scheduler.running, self._thresholds.acceptance, thresholds, self._stats.kv_tokens)
        try:
            batch = self._schedule()
        except Exception as error:  # memory for a wider cache: which request it was for cannot be told
            return chunks + self._start_over(error)
        if batch:
            chunks += self._run(batch, audit=(self._stats.steps + 1) % AUDIT_EVERY == 0)
            self._free_ended()
            self._stats.step_ended(batch)
        if not self.busy:
            self._stats.idle()
        return chunks

    def clear_cache(self) -> None:
        """Forget what ended sequences left behind. Raises `ConfigError` while sequences run."""
        if self.running:
            raise ConfigError(f"{self.running} sequences run; the cache can be cleared between them only.")
        self._slots.clear()

    def wait_until_compiled(self) -> None:
        """Wait until what can be compiled is; without it the first steps are eager."""
        self._runner.wait_until_compiled()

    def close(self) -> None:
        """Stop compiling. Requests still here get no further chunk."""
        self._runner.close()

    def _schedule(self) -> list[ScheduledSequence]:
        batch = self._scheduler.schedule(self._masks_for)
        if self._slots.operations:
            self._cache.apply(self._slots.operations)
            self._slots.operations.clear()
        return batch

    def _masks_for(self, sequence: Sequence) -> Masks:
        needs = self._thresholds.acceptance(sequence) if self._adapters.looks_ahead(sequence) else None
        return self._blocks.masks_for(sequence, needs, self.limits.max_model_len)

    def _run(self, batch: list[ScheduledSequence], audit: bool) -> list[Chunk]:
        """Run one forward over `batch`, verify and commit it; where that fails, find the sequences it fails for."""
        try:
            inputs, picks = self._packer.pack(batch, self._slots.num_active, audit=audit)
            output = self._runner.run(inputs)
            choosing = [picks_of(*each) for each in zip(batch, picks, strict=True)]
            self._adapters.correct_masks(self._runner.mask_samplers, batch, choosing, output)
            proposed = propose_all(batch, choosing, output)
        except Exception as error:  # memory, or the model's own code: the others must go on
            if len(batch) == 1:
                return [self._fail(batch[0].sequence, error)]
            # A forward changes nothing but keys and values, which the next one writes again.
            return [chunk for scheduled in batch for chunk in self._run([scheduled], audit)]
        self._stats.kv_tokens = inputs.kv_tokens
        chunks = []
        for scheduled, where, proposals in zip(batch, picks, proposed, strict=True):
            try:
                if scheduled.has_logits:
                    chunks.append(self._verify_and_commit(scheduled, where, proposals, output))
                else:
                    scheduled.sequence.num_computed_tokens += scheduled.num_tokens
            except Exception as error:  # what works on one sequence alone fails it alone
                chunks.append(self._fail(scheduled.sequence, error))
        return chunks

    def _verify_and_commit(
        self, scheduled: ScheduledSequence, picks: slice, proposals: Proposals, output: ForwardOutput
    ) -> Chunk:
        sequence = scheduled.sequence
        acceptance = self._thresholds.acceptance(sequence)
        needs = acceptance or LOSSLESS  # without masks there is nothing to accept
        left = sequence.max_tokens - sequence.num_output_tokens
        price = self._blocks.draft_price
        found = verify(proposals, sequence.draft_tokens, needs, price, sequence.stop_ids, left)
        record(self.profile, scheduled, picks, found, output, acceptance, price)
        count = sequence.request.sampling.logprobs
        audits = () if count is None else audits_of(scheduled, picks, output)
        emitted = advance(sequence, found, verify=needs.verify)
        if emitted.tokens:
            self._stats.gained(sequence)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if count is not None:
            logprobs = logprobs_of(emitted, picks_of(scheduled, picks).start, count, output, sequence.forwards)
        return Chunk(
            request_id=sequence.request.id,
            index=sequence.index,
            tokens=emitted.tokens,
            pieces=emitted.pieces,
            logprobs=logprobs,
            audits=audits,
            threshold=needs.quality,
            masks=scheduled.num_masks,
            finished=emitted.reason and self._finish(sequence, emitted.reason),
        )

    def _finish(self, sequence: Sequence, reason: FinishReason, error: MarsRayError | None = None) -> Finished:
        self._ended.append(sequence)
        self._stats.ended(sequence)
        siblings = self._requests[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.id]
        return sequence.finished(reason, self._clock(), error)

    def _cut_short(self, sequence: Sequence, reason: FinishReason, error: MarsRayError | None = None) -> Chunk:
        """Return the chunk of a sequence that ends between its tokens."""
        finished = self._finish(sequence, reason, error)
        pieces = (sequence.detokenizer.finish(),)
        return Chunk(sequence.request.id, sequence.index, tokens=(), pieces=pieces, finished=finished)

    def _fail(self, sequence: Sequence, error: Exception) -> Chunk:
        if isinstance(error, GrammarError):  # what the caller asked for, and can change
            return self._cut_short(sequence, "error", error)
        reason = f"decoding failed: {type(error).__name__}: {error}".rstrip(". ")
        return self._cut_short(sequence, "error", StepError(f"{reason}. The engine serves other requests."))

    def _free_ended(self) -> None:
        """Free the slots of sequences that ended, once every sequence of the step has noted what is in its own."""
        for sequence in self._ended:
            self._scheduler.remove(sequence)
        self._ended.clear()

    def _start_over(self, error: Exception) -> list[Chunk]:
        """Fail what is running and begin with an empty cache; what waits is served from there.

        Where nothing runs, what waits is what it fails for, and would again.
        """
        waiting = [sequence for siblings in self._requests.values() for sequence in siblings]
        chunks = [self._fail(sequence, error) for sequence in list(self._scheduler.running) or waiting]
        self._free_ended()
        self.clear_cache()
        self._cache.resize(0, 0)
        return chunks
