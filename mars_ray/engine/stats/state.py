"""What an engine reports of itself between two steps."""

from dataclasses import dataclass

from mars_ray.engine.stats.profile import ProfilePoint
from mars_ray.engine.stats.step_time import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassState:
    """One class of service in an engine. What arrived and ended is counted since the engine started."""

    name: str
    threshold: float
    """Threshold of the requests that name none."""
    running: int
    """Sequences that have a slot of the cache."""
    waiting: int
    """Sequences in the waiting queue."""
    arrived: int
    """Sequences asked for, also those that were refused because the queue was full."""
    prompt_tokens: int
    """Tokens of the prompts that arrived; the n sequences of a request share one prompt."""
    ended: int
    """Sequences that ran and ended."""
    tokens: int
    """Tokens of the sequences that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """An engine at one moment."""

    max_num_seqs: int
    """Sequences the engine runs at a time at most."""
    classes: tuple[ClassState, ...]
    tokens_running: int
    """Tokens generated so far by the sequences that run."""
    kv_cache_usage: float
    """Share of the KV cache that running sequences fill."""
    kv_tokens: int
    """Tokens in the cache that the last step attended to."""
    steps: int
    """Steps that ran a forward so far."""
    preemptions: int
    """How often a running sequence had to give its slot back so far."""
    threshold_changes: int
    """How often the threshold of a class took another value so far."""
    block: int
    """The block chosen for the last step."""
    profile: tuple[ProfilePoint, ...]
    step_time: StepTime | None
    """What a step takes; None before enough steps were seen."""
    ttft_p95_s: float | None
    """Seconds from arrival to first token, 95th percentile of the last seconds."""
    tpot_p95_s: float | None
    """Seconds for each token after the first, 95th percentile of the sequences that ended in the last seconds."""

    @property
    def running(self) -> int:
        """Sequences that have a slot of the cache."""
        return sum(each.running for each in self.classes)

    @property
    def tokens(self) -> int:
        """Tokens generated, those of sequences that run included; a preempted one counts again once it runs."""
        return self.tokens_running + sum(each.tokens for each in self.classes)

    @property
    def waiting(self) -> int:
        """Sequences in the waiting queue."""
        return sum(each.waiting for each in self.classes)
