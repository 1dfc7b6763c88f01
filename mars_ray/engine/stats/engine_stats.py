"""Counters, latencies and step times of an engine, and the clock of its steps."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mars_ray.engine.request import Request
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.scheduling.waiting_queue import WaitingQueue
from mars_ray.engine.service_class import BATCH_CLASS
from mars_ray.engine.stats.state import ClassState, ModelledSteps
from mars_ray.engine.stats.step_time import StepTime, StepTimeFit, StepWork
from mars_ray.machines.step_model import StepModel

WINDOW_S = 10.0
MAX_VALUES = 1024


class LatencyWindow:
    """Latencies of the last `WINDOW_S` seconds, up to `MAX_VALUES` of them."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, now_s: float, latency_s: float) -> None:
        """Record a latency."""
        self._values.append((now_s, latency_s))

    def p95(self, now_s: float) -> float | None:
        """Return the 95th percentile; None for an empty window."""
        latencies = [latency_s for recorded_s, latency_s in self._values if now_s - recorded_s <= WINDOW_S]
        return float(np.percentile(latencies, 95)) if latencies else None


@dataclass(slots=True)
class _Counts:
    """Counters of one class of service since the engine started (see `ClassState`)."""

    arrived: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    tokens: int = 0
    cached_tokens: int = 0


class StepClock:
    """Measures steps by `clock`. Work between two steps, such as sending chunks, counts as part of the next step.

    A step lasts as long as it takes here or, in a rehearsal, as long as a `model` of another machine says. Nothing else
    of an engine knows which.
    """

    def __init__(
        self, clock: Callable[[], float], model: StepModel | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._model = model
        self._sleep = sleep
        self._began_s = 0.0
        self._ended_s: float | None = None
        """End of the last step; None if the engine has been idle since."""
        self._forwarded_s: float | None = None
        """End of the last forward on the modelled machine; None if the engine has been idle since."""
        self.slow_steps = 0
        """Number of steps that took longer here than on the modelled machine."""

    @property
    def modelled(self) -> ModelledSteps | None:
        """The machine whose step times these are; None for the time of this machine."""
        return ModelledSteps(name=self._model.name, slow_steps=self.slow_steps) if self._model else None

    def begin(self) -> None:
        """Begin a step."""
        self._began_s = self._clock()

    def forwarded(self, work: StepWork) -> None:
        """In a rehearsal, wait until a forward that did this work would have ended on the modelled machine.

        It ends before its tokens are committed, so that latencies include it. The forward counts from the end of the
        last one, if the engine was not idle in between. So the time in which tokens are committed and sent is part of
        the next step, as on a machine that overlaps the two.
        """
        if self._model is None:
            return
        began_s = self._began_s if self._forwarded_s is None else self._forwarded_s
        ends_s = began_s + work.modelled_s(self._model)
        now_s = self._clock()
        if now_s > ends_s:
            self.slow_steps += 1
            self._forwarded_s = now_s
        else:
            self._sleep(ends_s - now_s)
            self._forwarded_s = ends_s  # not the current time; otherwise late wake-ups would add up

    def end(self) -> float:
        """End the step and return its seconds."""
        since_s = self._began_s if self._ended_s is None else self._ended_s
        self._ended_s = self._clock()
        return self._ended_s - since_s

    def idle(self) -> None:
        """Leave the time until the next step out, because the engine has no work."""
        self._ended_s = self._forwarded_s = None


class EngineStats:
    """Counts events by class of service, keeps recent latencies, and fits `step_time` to the times of steps."""

    def __init__(
        self,
        classes: Iterable[str],
        clock: Callable[[], float],
        *,
        step_model: StepModel | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Count for `classes`. With `step_model`, steps take the times of the machine that it describes."""
        self._clock = clock
        self.step_clock = StepClock(clock, step_model, sleep)
        self.step_time = StepTimeFit()
        self._counts = {name: _Counts() for name in classes}
        self._timed = self._counts.keys() - {BATCH_CLASS} or self._counts.keys()
        """Classes whose latencies count. Rows of batches wait for callers, to whom alone latencies are promised."""
        self._ttft_s = LatencyWindow()
        self._tpot_s = LatencyWindow()
        self.steps = 0
        """Steps that ran a forward."""
        self.kv_tokens = 0
        """Tokens in the cache that the last step attended to."""
        self.progress = 0
        """Prompt tokens read, tokens generated and sequences ended. It rises as long as the engine makes progress."""

    def arrived(self, request: Request) -> None:
        """Count a request, whether it is queued or refused because the queue is full."""
        counts = self._counts[request.service_class]
        counts.arrived += len(request.indices)
        counts.prompt_tokens += len(request.prompt)  # the n sequences of a request share one prompt in the cache

    def ended(self, sequence: Sequence) -> None:
        """Count a sequence that has ended, unless it ended while it was still queued."""
        self.progress += 1
        if sequence.started_s is not None:
            counts = self._counts[sequence.service_class]
            counts.ended += 1
            counts.tokens += sequence.num_output_tokens
            tokens_here = sequence.num_output_tokens - sequence.num_partial_tokens
            if sequence.first_token_s is not None and tokens_here > 1 and sequence.service_class in self._timed:
                now_s = self._clock()
                self._tpot_s.add(now_s, (now_s - sequence.first_token_s) / (tokens_here - 1))

    def read(self, tokens: int) -> None:
        """Count tokens of a part of a prompt that stops short of the prompt's end."""
        self.progress += tokens

    def gained(self, sequence: Sequence, tokens: int) -> None:
        """Count generated tokens. If they are the sequence's first ones, record the time to the first token."""
        self.progress += tokens
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s = self._clock()
            if sequence.index == 0:  # the n sequences of a request share one prompt
                self._counts[sequence.service_class].cached_tokens += sequence.num_cached_tokens
            if sequence.service_class in self._timed:
                self._ttft_s.add(now_s, now_s - sequence.added_s)

    def forward_ended(self, batch: list[ScheduledSequence], kv_tokens: int) -> None:
        """Record a forward that attended to `kv_tokens`, before its tokens are committed."""
        self.kv_tokens = kv_tokens
        self.step_clock.forwarded(_work_of(batch, kv_tokens))

    def step_ended(self, batch: list[ScheduledSequence]) -> None:
        """Record the work and the time of a step."""
        self.steps += 1
        self.step_time.observe(_work_of(batch, self.kv_tokens), self.step_clock.end())

    def class_states(
        self, running_seqs: Iterable[Sequence], waiting: WaitingQueue, thresholds: Mapping[str, float]
    ) -> tuple[ClassState, ...]:
        """Return the state of each class of service."""
        running = Counter(sequence.service_class for sequence in running_seqs)
        return tuple(
            ClassState(
                name=name,
                threshold=thresholds[name],
                running=running[name],
                waiting=waiting.count(name),
                arrived=counts.arrived,
                prompt_tokens=counts.prompt_tokens,
                ended=counts.ended,
                tokens=counts.tokens,
                cached_tokens=counts.cached_tokens,
            )
            for name, counts in self._counts.items()
        )

    def ttft_p95_s(self) -> float | None:
        """Return the 95th percentile of recent times to the first token; None if the window is empty."""
        return self._ttft_s.p95(self._clock())

    def tpot_p95_s(self) -> float | None:
        """Return the 95th percentile of the time per token of recently ended sequences; None if the window is empty."""
        return self._tpot_s.p95(self._clock())


def predicted_s(model: StepTime | None, batch: list[ScheduledSequence]) -> float | None:
    """Return the seconds that a step over `batch` is predicted to take; None without a model."""
    if model is None:
        return None
    return model.seconds(_work_of(batch, sum(len(scheduled.sequence.tokens) for scheduled in batch)))


def _work_of(batch: list[ScheduledSequence], kv_tokens: int) -> StepWork:
    decoding = [scheduled for scheduled in batch if scheduled.is_decode]
    return StepWork(
        num_seqs=len(decoding),
        positions=sum(scheduled.num_positions for scheduled in decoding),
        kv_tokens=kv_tokens,
        prompt_tokens=sum(scheduled.num_positions for scheduled in batch if not scheduled.is_decode),
        masks=sum(scheduled.num_masks for scheduled in decoding),
    )
