"""The decode engine: turn requests into chunks of tokens, one step at a time.

A step schedules sequences, runs one forward, verifies drafts and commits tokens. Each scheduled sequence feeds the
tokens that the network has not seen yet, then unverified drafts, then masks. The logits at the last token predict the
next token, as in autoregressive decoding, and the logits at masks predict tokens further ahead.

The caller calls `step` (see `process/worker`). A failing request does not affect other requests, and returned tokens
are final.
"""

import random
import time
from collections import abc
from dataclasses import replace
from pathlib import Path

from mars_ray.engine.chunk import Chunk, Finished, FinishReason
from mars_ray.engine.core.adapters import AdaptersByName, LoadedAdapter
from mars_ray.engine.core.forwards import Forwards
from mars_ray.engine.core.limits import resolve_limits
from mars_ray.engine.core.sequences import ClassThresholds, new_sequences
from mars_ray.engine.execution.model_runner import ForwardOutput, Picks
from mars_ray.engine.grammar.matcher import Grammars
from mars_ray.engine.kv.slot_allocator import SlotAllocator
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import DEFAULT_OPTIONS, EngineOptions
from mars_ray.engine.request import LOSSLESS, Acceptance, Request
from mars_ray.engine.sampling.commit import advance, audits_of, chosen_picks, judged_prediction, record
from mars_ray.engine.sampling.draft_choice import DraftChoice
from mars_ray.engine.sampling.proposals import logprobs_of, prompt_logprobs_of, propose_all
from mars_ray.engine.sampling.verify import Proposals, verify
from mars_ray.engine.scheduling.scheduler import Masks, ScheduledSequence, Scheduler
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.service_class import class_names
from mars_ray.engine.stats.block_choice import BlockChoice, reproducible
from mars_ray.engine.stats.engine_stats import EngineStats, predicted_s
from mars_ray.engine.stats.profile import Profile
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import ConfigError, GrammarError, MarsRayError, RequestError, StepError
from mars_ray.method.drafts import PositionPrice
from mars_ray.model.checkpoint import Checkpoint

AUDIT_EVERY = 16
"""Number of steps between two audits. An audit compares tokens accepted at masks with the model's own choice."""


class Engine:
    """Decodes with the network of `checkpoint`, and may replace the network's attention. Not thread-safe.

    The adapter that a request names applies only to the request's masks; see `core/adapters`.
    `consume` lets the engine free weights after packing a copy of them; the network itself cannot run afterwards, and
    must have the weights of its folder, because rounded copies are kept in the user's cache.
    Raises `ModelError` for an unsupported network, `AdapterError` for an adapter that does not fit it, and
    `ConfigError` for impossible sizes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions = DEFAULT_OPTIONS,
        *,
        adapters: AdaptersByName | None = None,
        consume: bool = False,
        clock: abc.Callable[[], float] = time.perf_counter,
        sleep: abc.Callable[[float], None] = time.sleep,
        new_seed: abc.Callable[[], int] | None = None,
    ) -> None:
        network = checkpoint.network
        self._checkpoint = checkpoint
        self._clock = clock
        self._new_seed = new_seed or (lambda: random.getrandbits(62))
        self.limits = limits = resolve_limits(network.config, network.dtype, network.device, options)
        self._thresholds = ClassThresholds(dict.fromkeys(class_names(options.classes), options.threshold))
        self._slots = SlotAllocator(
            max_tokens=limits.max_kv_tokens, max_slots=limits.max_num_seqs, max_model_len=limits.max_model_len
        )
        self._scheduler = Scheduler(
            self._slots,
            classes=options.classes,
            max_waiting_seqs=options.max_waiting_seqs,
            max_prefill_tokens=options.max_prefill_tokens,
            clock=clock,
            step_s=lambda batch: predicted_s(self.step_time.model, batch),
        )
        self._max_prefill_tokens = options.max_prefill_tokens
        self._forwards = Forwards(checkpoint, options, adapters or {}, consume=consume)
        self._adapters = self._forwards.adapters
        self.kernels = self._forwards.kernels
        self.grammars = Grammars(checkpoint, limits.vocab_size)
        """Compiled grammars of requests; `add` compiles a grammar that was not prepared."""
        self.profile = Profile(self.block, self._adapters.calibration, lenient=self._adapters.lenient)
        self._stats = EngineStats(self._thresholds.by_class, clock, step_model=options.step_model, sleep=sleep)
        self.step_time = self._stats.step_time
        self._blocks = BlockChoice(self.profile, self.step_time)
        self._drafts = DraftChoice(limits.max_model_len)
        self._requests: dict[str, list[Sequence]] = {}
        """Sequences of each request that have not ended."""
        self._cancelled: list[Chunk] = []
        """Last chunks of sequences cancelled since the last step."""
        self._ended: list[Sequence] = []
        """Sequences that ended in this step and still hold their slots."""

    def set_thresholds(self, thresholds: abc.Mapping[str, float]) -> None:
        """Set the thresholds of some classes between two steps. If it raises `ConfigError`, no threshold changes."""
        self._thresholds.set(thresholds)

    @property
    def block(self) -> int:
        """Maximum number of tokens proposed per forward, for requests that set no block."""
        return self._adapters.block

    def load_adapter(self, folder: Path) -> LoadedAdapter:
        """Load and pack the adapter in `folder`. Any thread may call it, one at a time, next to the steps.

        Raises `AdapterError` if the adapter is missing, incomplete, or does not fit the model.
        """
        return self._adapters.load(folder)

    def set_adapters(self, adapters: abc.Mapping[str, LoadedAdapter]) -> None:
        """Replace the adapters with a name between two steps. Requests keep the adapter that they began with."""
        self._adapters.set(adapters)
        self.profile.widen(self.block, self._adapters.calibration, lenient=self._adapters.lenient)

    @property
    def running(self) -> int:
        """Number of sequences that have a slot in the cache."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Number of sequences in the waiting queue."""
        return len(self._scheduler.waiting)

    @property
    def busy(self) -> bool:
        """True while a step has work to do or chunks to return."""
        return bool(self._requests or self._cancelled)

    def state(self) -> EngineState:
        """Return a snapshot for operators and the controller."""
        return EngineState(
            max_num_seqs=self.limits.max_num_seqs,
            classes=self._stats.class_states(
                self._scheduler.running, self._scheduler.waiting, self._thresholds.by_class
            ),
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
            progress=self._stats.progress,
            longest_step_s=self.step_time.longest_s(self._max_prefill_tokens + self.running * (1 + self.block)),
            drafts=self._drafts.counts(),
            acceptance=self._adapters.acceptance,
            modelled=self._stats.step_clock.modelled,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` for an invalid request and `QueueFullError` if the queue is full."""
        self.limits.check(request)
        self._adapters.check(request)
        if request.id in self._requests:
            raise RequestError(f"a request with the id {request.id!r} is already here; ids must differ.")
        self._thresholds.check_class(request)
        seed = self._new_seed() if request.sampling.seed is None else request.sampling.seed
        sequences = new_sequences(request, seed, self._checkpoint, self.limits, self.grammars)
        self._stats.arrived(request)
        self._scheduler.add(sequences)
        self._requests[request.id] = sequences
        # The caller of a cancelled request with this id has left, and its last chunk would end this request.
        self._cancelled = [chunk for chunk in self._cancelled if chunk.request_id != request.id]
        self._adapters.begin(request)

    def cancel(self, request_id: str) -> None:
        """End a request at once. Unknown ids are ignored, because the request may have ended already."""
        for sequence in list(self._requests.get(request_id, ())):
            self._cancelled.append(self._cut_short(sequence, "cancelled"))
        self._free_ended()

    def step(self) -> list[Chunk]:
        """Run one forward. Return its chunks and the last chunks of sequences cancelled since the last step."""
        self._stats.step_clock.begin()
        chunks, self._cancelled = self._cancelled, []
        thresholds = tuple(self._thresholds.by_class.values())
        self._blocks.next_step(self._scheduler.running, self._acceptance, thresholds, self._stats.kv_tokens)
        try:
            batch = self._schedule()
        except Exception as error:  # no memory for a wider cache, which is not the fault of one request
            return chunks + self._start_over(error)
        if batch:
            gained = self._run(batch, audit=(self._stats.steps + 1) % AUDIT_EVERY == 0)
            self._observe_gain(batch, gained)
            chunks += gained
            self._free_ended()
            self._stats.step_ended(batch)
        if not self.busy:
            self._stats.step_clock.idle()
        return chunks

    def clear_cache(self) -> None:
        """Drop the cached prefixes and the recent answers. Raises `ConfigError` if any sequence is running."""
        if self.running:
            raise ConfigError(f"{self.running} sequences run; clear the cache when no sequence runs.")
        self._slots.clear()
        self._drafts.forget()

    def close(self) -> None:
        """Leave the network without the engine's hooks. Call no other method afterwards."""
        self._forwards.runner.close()

    def _schedule(self) -> list[ScheduledSequence]:
        batch = self._scheduler.schedule(self._masks_for)
        if self._slots.operations:
            self._forwards.cache.apply(self._slots.operations)
            self._slots.operations.clear()
        return batch

    def _masks_for(self, sequence: Sequence) -> Masks:
        decoder = self._adapters.decoder_of(sequence)
        return self._blocks.masks_for(
            sequence,
            self._acceptance(sequence),
            decoder.block,
            self.limits.max_model_len,
            trial=decoder.watch.on_trial,
        )

    def _acceptance(self, sequence: Sequence) -> Acceptance | None:
        """Return the condition for keeping tokens in a sequence now; None if the sequence gets no masks."""
        decoder = self._adapters.decoder_of(sequence)
        acceptance = self._thresholds.acceptance(sequence, lenient=decoder.lenient) if decoder.block > 1 else None
        if acceptance and decoder.watch.off and not reproducible(sequence, acceptance):
            return None
        return acceptance

    def _run(self, batch: list[ScheduledSequence], audit: bool) -> list[Chunk]:
        """Run one forward over `batch`, verify and commit. If the forward fails, run each sequence alone."""
        try:
            picks, output, kv_tokens = self._forwards.run(batch, audit=audit)
            proposed = propose_all(batch, picks, output)
        except Exception as error:  # out of memory or a bug in the model's code; other sequences must go on
            if len(batch) == 1:
                return [self._fail(batch[0].sequence, error)]
            # Running again is safe, because a forward only writes keys and values, which are overwritten.
            return [chunk for scheduled in batch for chunk in self._run([scheduled], audit)]
        self._stats.forward_ended(batch, kv_tokens)
        text_price = self._blocks.text_price(self.running, self._stats.kv_tokens)
        chunks = []
        for scheduled, read, proposals in zip(batch, picks, proposed, strict=True):
            sequence = scheduled.sequence
            try:
                if sequence.prompt_logprobs is not None:
                    sequence.prompt_logprobs += prompt_logprobs_of(scheduled, read, output)
                if scheduled.has_logits:
                    chunks.append(self._verify_and_commit(scheduled, read, proposals, output, text_price))
                else:
                    sequence.num_computed_tokens += scheduled.num_tokens
                    self._stats.read(scheduled.num_tokens)
            except Exception as error:  # an error here concerns one sequence only
                chunks.append(self._fail(sequence, error))
        return chunks

    def _observe_gain(self, batch: list[ScheduledSequence], chunks: list[Chunk]) -> None:
        """Record what the step gained for the choice of drafts, unless it read a prompt."""
        if all(scheduled.is_decode for scheduled in batch):
            tokens = sum(len(chunk.tokens) for chunk in chunks)
            self._blocks.observe(len(batch), tokens, sum(scheduled.num_positions for scheduled in batch))

    def _verify_and_commit(
        self,
        scheduled: ScheduledSequence,
        picks: Picks,
        proposals: Proposals,
        output: ForwardOutput,
        text_price: PositionPrice,
    ) -> Chunk:
        sequence = scheduled.sequence
        scored, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs or ()), None
        if sequence.max_tokens == 0:
            sequence.num_computed_tokens += scheduled.num_tokens
            return replace(self._cut_short(sequence, "length"), prompt_logprobs=scored)
        acceptance = self._acceptance(sequence)
        rule = acceptance or LOSSLESS  # without masks nothing is accepted
        left = sequence.max_tokens - sequence.num_output_tokens
        price = self._blocks.draft_price(sequence, rule)
        verified = verify(proposals, sequence.drafts.tokens, rule, price, sequence.stop_ids, left)
        audits = audits_of(sequence, picks, output)
        record(self.profile, scheduled, picks, verified, output, acceptance, price, audits)
        self._drafts.verified(sequence, verified.num_accepted_drafts, len(verified.verified))
        watch = self._adapters.decoder_of(sequence).watch
        judged = judged_prediction(sequence, verified, audits, rule.metric)
        if judged and watch.observe(*judged) and self._adapters.have_masks:
            self.profile.forget(self._adapters.calibration)  # what it learned from the collapse holds no longer
        emitted = advance(sequence, verified)
        watch.generated(len(emitted.tokens))
        if emitted.tokens:
            self._stats.gained(sequence, len(emitted.tokens))
        drafts_text = sequence.request.decode.mode is not Mode.AR and not reproducible(sequence, rule)
        if emitted.reason is None and drafts_text:
            self._drafts.choose(sequence, text_price, self.running)
        count = sequence.request.sampling.logprobs
        chosen = chosen_picks(picks, verified)
        return Chunk(
            request_id=sequence.request.id,
            index=sequence.index,
            tokens=emitted.tokens,
            pieces=emitted.pieces,
            logprobs=() if count is None else logprobs_of(emitted, chosen, count, output, sequence.forwards),
            prompt_logprobs=scored,
            audits=() if count is None else audits,
            threshold=rule.threshold,
            accepted=((rule.threshold, emitted.accepted),) if emitted.accepted else (),
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
            self._adapters.end(sequence.request.id)
        self._drafts.ended(sequence, last=not siblings)
        return sequence.finished(reason, self._clock(), error)

    def _cut_short(self, sequence: Sequence, reason: FinishReason, error: MarsRayError | None = None) -> Chunk:
        """End a sequence between two steps and return its last chunk."""
        finished = self._finish(sequence, reason, error)
        pieces = (sequence.detokenizer.finish(),)
        return Chunk(sequence.request.id, sequence.index, tokens=(), pieces=pieces, finished=finished)

    def _fail(self, sequence: Sequence, error: Exception) -> Chunk:
        if isinstance(error, GrammarError):  # the caller's own grammar failed, so pass its message on
            return self._cut_short(sequence, "error", error)
        reason = f"decoding failed: {type(error).__name__}: {error}".rstrip(". ")
        return self._cut_short(sequence, "error", StepError(f"{reason}. The engine serves other requests."))

    def _free_ended(self) -> None:
        """Free the slots of ended sequences. Call it after every sequence of the step has committed its tokens."""
        for sequence in self._ended:
            self._scheduler.remove(sequence)
        self._ended.clear()

    def _start_over(self, error: Exception) -> list[Chunk]:
        """Fail the running sequences and clear the cache, so that waiting sequences can be served next.

        If no sequence is running, fail the waiting sequences instead, because they would fail again.
        """
        waiting = [sequence for siblings in self._requests.values() for sequence in siblings]
        chunks = [self._fail(sequence, error) for sequence in list(self._scheduler.running) or waiting]
        self._free_ended()
        self.clear_cache()
        self._forwards.cache.resize(0, 0)
        return chunks
