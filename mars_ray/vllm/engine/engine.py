"""The engine over vLLM: our waiting queue and texts, and vLLM's scheduler, cache and network.

vLLM gets as many sequences as it runs at once, so that service classes and refusals stay ours.
"""

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mars_ray.engine.chunk import Chunk, Finished, FinishReason, TokenLogprobs
from mars_ray.engine.core.adapters import LoadedAdapter
from mars_ray.engine.core.sequences import ClassThresholds, new_sequences
from mars_ray.engine.grammar.matcher import Grammars, ModelTokens
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import LOSSLESS, Request
from mars_ray.engine.sampling.commit import Emitted, emit
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.scheduling.waiting_queue import WaitingQueue
from mars_ray.engine.service_class import class_names
from mars_ray.engine.stats.engine_stats import EngineStats
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import AdapterError, MarsRayError, ReplicaLostError, RequestError, StepError
from mars_ray.vllm.engine.core import CoreOutput, DecodingCore
from mars_ray.vllm.engine.records import Records
from mars_ray.vllm.engine.sampling import check_request, resume_obstacle


class VllmEngine:
    """An engine as in `mars_ray.engine.core.decoding_engine`. `core` runs vLLM in this process. Not thread-safe.

    vLLM gets a sequence only when one of its `max_num_seqs` places is free. Until then the sequence waits here. A
    sequence of lower priority leaves its place to a waiting one, and goes on later from the tokens that it has.
    """

    def __init__(
        self,
        core: DecodingCore,
        model: ModelTokens,
        options: EngineOptions,
        *,
        records: Records,
        clock: Callable[[], float] = time.perf_counter,
        new_seed: Callable[[], int] | None = None,
    ) -> None:
        self._core = core
        self._model = model
        self._clock = clock
        self._new_seed = new_seed or (lambda: random.getrandbits(62))
        self._records = records
        self.limits = core.limits
        self.block = core.block
        self.kernels = "vLLM"
        self.grammars = Grammars(model, self.limits.vocab_size)
        self._thresholds = ClassThresholds(dict.fromkeys(class_names(options.classes), options.threshold))
        self._queue = WaitingQueue(options.classes, options.max_waiting_seqs)
        self._stats = EngineStats(self._thresholds.by_class, clock)
        self._running: dict[str, Sequence] = {}
        """Sequences in vLLM, by key, in order of admission."""
        self._keys: dict[Sequence, str] = {}
        """Keys of sequences in vLLM. Each key is used once, so no late output of a preempted sequence counts."""
        self._admitted = 0
        """Number of admissions so far."""
        self._preemptions = 0
        """Number of preemptions by priority so far."""
        self._requests: dict[str, list[Sequence]] = {}
        """Sequences of each request that have not ended."""
        self._cancelled: list[Chunk] = []
        """Last chunks of sequences cancelled since the last step."""

    @property
    def running(self) -> int:
        """Number of sequences in vLLM."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences in the waiting queue."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """True while a step has work to do or chunks to return."""
        return bool(self._requests or self._cancelled)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` for an invalid request and `QueueFullError` if the queue is full."""
        self.limits.check(request)
        check_request(request)
        if request.id in self._requests:
            raise RequestError(f"a request with the id {request.id!r} is already here; ids must differ.")
        self._thresholds.check_class(request)
        seed = self._new_seed() if request.sampling.seed is None else request.sampling.seed
        sequences = new_sequences(request, seed, self._model, self.limits, None)
        for sequence in sequences:
            self._core.check(sequence)
        self._stats.arrived(request)
        for sequence in sequences:
            sequence.added_s = self._clock()
        self._queue.add(sequences)
        self._requests[request.id] = sequences
        # The caller of a cancelled request with this id has left, and its last chunk would end this request.
        self._cancelled = [chunk for chunk in self._cancelled if chunk.request_id != request.id]

    def cancel(self, request_id: str) -> None:
        """End a request at once. Unknown ids are ignored, because the request may have ended already."""
        for sequence in list(self._requests.get(request_id, ())):
            self._cancelled.append(self._cut_short(sequence, "cancelled"))

    def step(self) -> list[Chunk]:
        """Run one step of vLLM. Return its chunks and the last chunks of sequences cancelled since the last step.

        Raises `ReplicaLostError` if vLLM fails, because it cannot go on after that.
        """
        chunks, self._cancelled = self._cancelled, []
        chunks += self._admit()
        if not self._running:
            return chunks
        try:
            outputs = self._core.step()
        except Exception as error:
            raise ReplicaLostError(f"vLLM failed: {type(error).__name__}: {error}".rstrip(". ") + ".") from error
        self._stats.steps += 1
        chunks += [self._commit(output) for output in outputs if output.key in self._running]
        return chunks

    def state(self) -> EngineState:
        """Return a snapshot for operators and the controller."""
        load = self._core.load()
        self._records.read(self._core.record(), self._core.forwards())
        sequences = self._running.values()
        return EngineState(
            max_num_seqs=self.limits.max_num_seqs,
            classes=self._stats.class_states(sequences, self._queue, self._thresholds.by_class),
            tokens_running=sum(sequence.num_output_tokens for sequence in sequences),
            kv_cache_usage=load.kv_cache_usage,
            kv_tokens=sum(len(sequence.tokens) for sequence in sequences),
            steps=self._stats.steps,
            preemptions=load.preemptions + self._preemptions,
            threshold_changes=self._thresholds.changes,
            block=self.block,
            profile=self._records.points(),
            step_time=self._records.step_time(),
            ttft_p95_s=self._stats.ttft_p95_s(),
            tpot_p95_s=self._stats.tpot_p95_s(),
            progress=self._stats.progress + self._records.positions,
        )

    def set_thresholds(self, thresholds: Mapping[str, float]) -> None:
        """Set the thresholds of some classes from the next step on. Raises `ConfigError` and then changes nothing."""
        before = dict(self._thresholds.by_class)
        self._thresholds.set(thresholds)
        if self._thresholds.by_class != before:
            self._core.set_thresholds(thresholds)

    def load_adapter(self, folder: Path) -> LoadedAdapter:
        """Raise `AdapterError`, because vLLM decodes with the model alone or with the adapter of its plug-in."""
        raise AdapterError(f"{folder} needs the engine mars. Set engine to mars, or leave the adapter out.")

    def set_adapters(self, adapters: Mapping[str, LoadedAdapter]) -> None:
        """Do nothing, because `load_adapter` refuses every adapter."""

    def close(self) -> None:
        """Stop vLLM. Call no other method afterwards."""
        self._core.close()

    def _admit(self) -> list[Chunk]:
        """Give waiting sequences to vLLM while it has places. Return the last chunks of those that it refuses."""
        refused = []
        while (head := self._queue.next()) is not None and self._has_place(head):
            sequence = self._queue.take()
            self._admitted += 1
            key = f"{sequence.request.id}:{sequence.index}:{self._admitted}"
            if sequence.started_s is None:
                sequence.started_s = self._clock()
            self._running[key] = sequence
            self._keys[sequence] = key
            try:
                self._core.add(key, sequence)
            except ValueError as error:
                refused.append(self._cut_short(sequence, "error", StepError(f"vLLM refuses the request: {error}.")))
            self._queue.served(sequence.service_class, sequence.num_prompt_tokens)
        return refused

    def _has_place(self, head: Sequence) -> bool:
        """Return whether vLLM has a place for a waiting sequence, if need be by preempting one of lower priority."""
        if len(self._running) < self.limits.max_num_seqs:
            return True
        lower = [
            sequence
            for sequence in self._running.values()
            if self._priority(sequence) < self._priority(head) and resume_obstacle(sequence.request.sampling) is None
        ]
        if not lower:
            return False
        youngest = min(reversed(lower), key=self._priority)
        self._leave(youngest)
        self._queue.put_back(youngest)
        self._preemptions += 1
        return True

    def _priority(self, sequence: Sequence) -> int:
        return self._queue.priority(sequence.service_class)

    def _leave(self, sequence: Sequence, *, is_over: bool = False) -> None:
        """Take a sequence out of vLLM. `is_over` means that vLLM has ended it already."""
        key = self._keys.pop(sequence)
        del self._running[key]
        if not is_over:
            self._core.abort(key)

    def _commit(self, output: CoreOutput) -> Chunk:
        """Add the tokens of a step to their sequence."""
        sequence = self._running[output.key]
        rule = self._thresholds.acceptance(sequence, lenient=False)
        if sequence.forwards == 0:  # later, a preempted sequence finds its own prompt in the cache
            sequence.num_cached_tokens = min(output.cached_tokens, sequence.num_prompt_tokens)
        emitted = emit(sequence, list(output.tokens), ended=output.finish_reason == "stop")
        sequence.tokens += emitted.tokens
        if emitted.tokens:
            sequence.forwards += 1
            self._stats.gained(sequence, len(emitted.tokens))
            self._queue.served(sequence.service_class, len(emitted.tokens))
        chunk = Chunk(
            request_id=sequence.request.id,
            index=sequence.index,
            tokens=emitted.tokens,
            pieces=emitted.pieces,
            logprobs=_logprobs(sequence, emitted, output),
            threshold=(rule or LOSSLESS).threshold,
            masks=0 if rule is None else min(self.block, sequence.request.decode.block or self.block) - 1,
            finished=emitted.reason
            and self._finish(sequence, emitted.reason, is_over=output.finish_reason is not None),
        )
        if output.finish_reason is not None and chunk.finished is None:  # vLLM ended the sequence for its own reason
            self._cancelled.append(
                self._cut_short(sequence, "error", StepError(f"vLLM ended the answer: {output.finish_reason}."))
            )
        return chunk

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: MarsRayError | None = None, *, is_over: bool = False
    ) -> Finished:
        """Take a sequence out of the engine. `is_over` means that vLLM has ended it, too."""
        if sequence in self._keys:
            self._leave(sequence, is_over=is_over)
        else:
            self._queue.remove(sequence)
        self._stats.ended(sequence)
        siblings = self._requests[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.id]
        return sequence.finished(reason, self._clock(), error)

    def _cut_short(self, sequence: Sequence, reason: FinishReason, error: MarsRayError | None = None) -> Chunk:
        """End a sequence and return its last chunk."""
        finished = self._finish(sequence, reason, error)
        pieces = (sequence.detokenizer.finish(),)
        return Chunk(sequence.request.id, sequence.index, tokens=(), pieces=pieces, finished=finished)


def _logprobs(sequence: Sequence, emitted: Emitted, output: CoreOutput) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of the emitted tokens, if the request asks for them."""
    count = sequence.request.sampling.logprobs
    if count is None:
        return ()
    return tuple(
        TokenLogprobs(
            chosen=candidates[token],
            top=tuple(sorted(candidates.items(), key=lambda candidate: -candidate[1])[:count]),
            start=start,
            forward=sequence.forwards,
        )
        for token, start, candidates in zip(emitted.tokens, emitted.starts, output.logprobs, strict=False)
    )
