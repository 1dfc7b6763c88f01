"""A snapshot of an engine between two steps."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mars_ray.engine.options import modelled_step_time
from mars_ray.engine.stats.profile import ProfilePoint
from mars_ray.engine.stats.step_time import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassState:
    """Load of one class of service. Counters start at 0 when the engine starts."""

    name: str
    threshold: float
    """Threshold of requests that do not set one."""
    running: int
    """Sequences that have a slot in the cache."""
    waiting: int
    """Sequences in the waiting queue."""
    arrived: int
    """Sequences requested, including those refused because the queue was full."""
    prompt_tokens: int
    """Prompt tokens that arrived; the n sequences of a request share one prompt."""
    ended: int
    """Sequences that ran and ended."""
    tokens: int
    """Tokens of the sequences that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalState:
    """A machine that an engine rehearses: its steps last as long as a model of that machine says."""

    name: str
    """Machine and network, such as `h200/qwen2.5-7b`."""
    slow_steps: int
    """Steps that took longer here than on the modelled machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Snapshot of an engine."""

    max_num_seqs: int
    """Maximum number of sequences that run at the same time."""
    classes: tuple[ClassState, ...]
    tokens_running: int
    """Tokens generated so far by the running sequences."""
    kv_cache_usage: float
    """Share of the KV cache that running sequences fill."""
    kv_tokens: int
    """Tokens in the cache that the last step attended to."""
    steps: int
    """Steps that ran a forward."""
    preemptions: int
    """Number of times that a running sequence lost its slot."""
    threshold_changes: int
    """Number of times that the threshold of a class changed."""
    block: int
    """Block chosen for the last step."""
    profile: tuple[ProfilePoint, ...]
    step_time: StepTime | None
    """Model of step times; None before the first fit."""
    ttft_p95_s: float | None
    """95th percentile of the time from arrival to the first token, over the last seconds."""
    tpot_p95_s: float | None
    """95th percentile of the time per token after the first, over sequences that ended in the last seconds."""
    rehearsal: RehearsalState | None = None
    """Machine whose step times the engine takes; None if steps take the time of this machine."""

    @property
    def running(self) -> int:
        """Sequences that have a slot in the cache."""
        return sum(state.running for state in self.classes)

    @property
    def tokens(self) -> int:
        """Tokens generated, including those of running sequences; a preempted sequence counts only while it runs."""
        return self.tokens_running + sum(state.tokens for state in self.classes)

    @property
    def waiting(self) -> int:
        """Sequences in the waiting queue."""
        return sum(state.waiting for state in self.classes)


def describe_rehearsals(states: Iterable[EngineState]) -> str:
    """Return the machines that engines rehearse, and the share of steps that were slower here; empty if no engine
    rehearses one."""
    steps: Counter[str] = Counter()
    slow_steps: Counter[str] = Counter()
    for state in states:
        if rehearsal := state.rehearsal:
            steps[rehearsal.name] += state.steps
            slow_steps[rehearsal.name] += rehearsal.slow_steps
    return "; ".join(
        f"{modelled_step_time(name)} ({slow_steps[name]:,} of {count:,} steps were slower here)"
        for name, count in steps.items()
    )
