"""What an engine counts and measures of its own work, beside the step: requests, latencies, step times."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mars_ray.engine.request import Request
from mars_ray.engine.scheduling.scheduler import ScheduledSequence, Scheduler
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.stats.latency_window import LatencyWindow
from mars_ray.engine.stats.state import ClassState
from mars_ray.engine.stats.step_time import StepTimeFit, StepWork


@dataclass(slots=True)
class _Counts:
    """What one class of service asked for and got since the engine started (see `ClassState`)."""

    arrived: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    tokens: int = 0


class EngineStats:
    """Counts by class of service, recent latencies, and the time of each step, which `step_time` learns from."""

    def __init__(self, classes: Iterable[str], step_time: StepTimeFit, clock: Callable[[], float]) -> None:
        self._step_time, self._clock = step_time, clock
        self._counts = {name: _Counts() for name in classes}
        self._ttft_s, self._tpot_s = LatencyWindow(), LatencyWindow()
        self._began_s = 0.0
        self._ended_s: float | None = None
        """When the last step ended, if there was more to do then."""
        self.steps = 0
        """Steps that ran a forward."""
        self.kv_tokens = 0
        """Tokens in the cache that the last step attended to."""

    def arrived(self, request: Request) -> None:
        """Count a request, whether it is queued or refused because the queue is full."""
        counts = self._counts[request.service_class]
        counts.arrived += request.sampling.n
        counts.prompt_tokens += len(request.prompt)  # the others of its n find it in the cache

    def ended(self, sequence: Sequence) -> None:
        """Count a sequence that ended, if it ever ran."""
        if sequence.started_s is not None:
            counts = self._counts[sequence.service_class]
            counts.ended += 1
            counts.tokens += sequence.num_output_tokens
            if sequence.first_token_s is not None and sequence.num_output_tokens > 1:
                now_s = self._clock()
                self._tpot_s.add(now_s, (now_s - sequence.first_token_s) / (sequence.num_output_tokens - 1))

    def gained(self, sequence: Sequence) -> None:
        """Record that a sequence gained tokens now."""
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s = self._clock()
            self._ttft_s.add(now_s, now_s - sequence.added_s)

    def step_began(self) -> None:
        """Record that a step begins."""
        self._began_s = self._clock()

    def step_ended(self, batch: list[ScheduledSequence]) -> None:
        """Record the work of a step that ends, and how long it took."""
        self.steps += 1
        decoding = [scheduled for scheduled in batch if scheduled.is_decode]
        work = StepWork(
            num_seqs=len(decoding),
            positions=sum(scheduled.num_positions for scheduled in decoding),
            kv_tokens=self.kv_tokens,
            prompt_tokens=sum(scheduled.num_positions for scheduled in batch if not scheduled.is_decode),
            masks=sum(scheduled.num_masks for scheduled in decoding),
        )
        # What lies between steps, such as sending chunks, is part of what a step takes.
        since_s = self._began_s if self._ended_s is None else self._ended_s
        self._ended_s = self._clock()
        self._step_time.observe(work, self._ended_s - since_s)

    def idle(self) -> None:
        """Record that there is nothing more to do: the next step begins when it is asked for."""
        self._ended_s = None

    def class_states(self, scheduler: Scheduler, thresholds: Mapping[str, float]) -> tuple[ClassState, ...]:
        """Return the state of each class of service."""
        running = Counter(sequence.service_class for sequence in scheduler.running)
        return tuple(
            ClassState(
                name=name,
                threshold=thresholds[name],
                running=running[name],
                waiting=scheduler.waiting.count(name),
                arrived=counts.arrived,
                prompt_tokens=counts.prompt_tokens,
                ended=counts.ended,
                tokens=counts.tokens,
            )
            for name, counts in self._counts.items()
        )

    def ttft_p95_s(self) -> float | None:
        """Return the 95th percentile of recent times to the first token; None when there were none."""
        return self._ttft_s.p95(self._clock())

    def tpot_p95_s(self) -> float | None:
        """Return the 95th percentile of the time per token of sequences that ended lately; None when none did."""
        return self._tpot_s.p95(self._clock())
