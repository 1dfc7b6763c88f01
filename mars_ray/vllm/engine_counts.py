"""What vLLM's engine says after each step: its load, what it has done so far, and recent latencies.

vLLM makes a stat logger for each engine of a process (`runner/stat_logger`), which fills the counts here. The agent
reads those of its engine.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from mars_ray.engine.stats.engine_stats import LatencyWindow


class PrefixCacheStats(Protocol):
    """The part of vLLM's `PrefixCacheStats` that is read."""

    hits: int


class SchedulerStats(Protocol):
    """The part of vLLM's `SchedulerStats` that is read."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_skipped_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_stats: PrefixCacheStats


class FinishedRequestStats(Protocol):
    """The part of vLLM's `FinishedRequestStats` that is read."""

    num_generation_tokens: int
    mean_time_per_output_token: float


class IterationStats(Protocol):
    """The part of vLLM's `IterationStats` that is read."""

    num_generation_tokens: int
    num_prompt_tokens: int
    num_preempted_reqs: int
    finished_requests: Sequence[FinishedRequestStats]
    time_to_first_tokens_iter: Sequence[float]


class EngineCounts:
    """Load, counts and latencies of one engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.running = self.waiting = 0
        self.kv_cache_usage = 0.0
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = self.preemptions = 0
        self.ended = self.ended_tokens = 0
        """Requests that have ended, and their tokens."""
        self._ttft_s, self._tpot_s = LatencyWindow(), LatencyWindow()

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Add the figures of one step."""
        if scheduler is not None:
            self.running = scheduler.num_running_reqs
            self.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self.kv_cache_usage = min(1.0, scheduler.kv_cache_usage)
            self.cached_tokens += scheduler.prefix_cache_stats.hits
        if iteration is None:
            return
        now_s = self._clock()
        self.prompt_tokens += iteration.num_prompt_tokens
        self.generation_tokens += iteration.num_generation_tokens
        self.preemptions += iteration.num_preempted_reqs
        for latency_s in iteration.time_to_first_tokens_iter:
            self._ttft_s.add(now_s, latency_s)
        for request in iteration.finished_requests:
            self.ended += 1
            self.ended_tokens += request.num_generation_tokens
            if request.num_generation_tokens > 1:
                self._tpot_s.add(now_s, request.mean_time_per_output_token)

    @property
    def ttft_p95_s(self) -> float | None:
        """95th percentile of the time to the first token over the last seconds; None without one."""
        return self._ttft_s.p95(self._clock())

    @property
    def tpot_p95_s(self) -> float | None:
        """95th percentile of the time per token after the first, over requests that ended in the last seconds."""
        return self._tpot_s.p95(self._clock())


COUNTS: WeakValueDictionary[str, EngineCounts] = WeakValueDictionary()
"""Counts of the engines of this process, by vLLM's `instance_id`. The stat logger of an engine keeps them."""
