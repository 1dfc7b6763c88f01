"""A snapshot of an engine between two steps, and the metrics that it exports.

A new metric is a field here, its value where the engine makes the snapshot, and an entry of `METRICS`. Processes on the
way to `/metrics` pass the snapshot on whole.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from mars_ray.engine.stats.profile import ProfilePoint, Share
from mars_ray.engine.stats.step_time import StepTime
from mars_ray.machines.step_model import step_notice


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassState:
    """Load of one class of service. Counters start at 0 when the engine starts."""

    name: str
    threshold: Share
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
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache, of sequences that have begun to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledSteps:
    """A machine whose step times an engine takes: its steps last as long as a model of that machine says."""

    name: str
    """Machine and network, such as `h200/qwen2.5-7b`."""
    slow_steps: int
    """Steps that took longer here than on the modelled machine."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts of one source since the engine started."""

    source: str
    """`masks`, `text`, or `grammar` for tokens that a grammar forces and for drafts from masks within a grammar."""
    drafted: int
    """Drafts that were verified, up to the first wrong one of each step."""
    right: int
    """Verified drafts that were right."""


@dataclass(frozen=True, slots=True)
class RestartCount:
    """Processes of an engine that another one has replaced, for one reason."""

    reason: str
    """`stalled` for a process that was killed because it made no progress; `ended` for any other end."""
    count: int


@dataclass(frozen=True, slots=True)
class SourceAcceptance:
    """Acceptance of one source of drafts over its latest predictions (see `acceptance_watch`)."""

    source: str
    """`masks`, or `masks of NAME` for the masks of a named adapter."""
    acceptance: Share
    """Share of the predictions that were right."""
    expected: Share
    """Acceptance that the card and the probabilities of the predictions promise."""
    alarm: int
    """1 if the acceptance has collapsed, so that the source is off or on trial; otherwise 0."""

    @property
    def figures(self) -> str:
        """The measured and the expected acceptance, as text."""
        return f"{self.acceptance:.0%} of the latest predictions were right, {self.expected:.0%} are expected"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Snapshot of an engine."""

    max_num_seqs: int
    """Maximum number of sequences that run at the same time."""
    classes: tuple[ClassState, ...]
    tokens_running: int
    """Tokens generated so far by the running sequences."""
    kv_cache_usage: Share
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
    progress: int = 0
    """Prompt tokens read, tokens generated and sequences ended since the engine started. An engine with sequences that
    leaves this number unchanged makes no progress."""
    longest_step_s: float | None = None
    """Bound of the time of a step, by the engine's measured steps; None before the first step."""
    restarts: tuple[RestartCount, ...] = ()
    """Processes of the engine that were replaced, by reason."""
    obstacle: str | None = None
    """Reason why the engine decodes nothing now; None if it works. Other values are then those of its last process."""
    drafts: tuple[DraftCounts, ...] = ()
    """Drafts so far, by source."""
    acceptance: tuple[SourceAcceptance, ...] = ()
    """Acceptance of the latest predictions, by source."""
    modelled: ModelledSteps | None = None
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

    def stopped(self, obstacle: str) -> "EngineState":
        """Return the state after the process of the engine has ended: nothing runs or waits, because of `obstacle`."""
        classes = tuple(replace(state, running=0, waiting=0) for state in self.classes)
        return replace(self, classes=classes, tokens_running=0, kv_cache_usage=0.0, obstacle=obstacle)


@dataclass(frozen=True, slots=True)
class StateMetric:
    """A Prometheus metric that is read from the state of an engine."""

    name: str
    help: str
    read: Callable[[EngineState], float | Mapping[str, float]]
    """Return the value; with a `label`, the values by that label. Values of labels never come from callers."""
    label: str | None = None
    counter: bool = False
    """Whether the metric is a counter, whose value never falls while the engine runs; other metrics are gauges."""


METRICS = (
    StateMetric("vllm:num_requests_running", "Sequences that have a slot.", lambda state: state.running),
    StateMetric("vllm:num_requests_waiting", "Sequences in the queue.", lambda state: state.waiting),
    StateMetric(
        "vllm:kv_cache_usage_perc", "Share of the cache that is filled, 0 to 1.", lambda state: state.kv_cache_usage
    ),
    StateMetric(
        "mars:engine_ready", "1 if the engine works, 0 while its process is replaced.", lambda state: not state.obstacle
    ),
    StateMetric(
        "mars:engine_restarts",
        "Processes of the engine that were replaced, by reason: stalled or ended.",
        lambda state: {restarts.reason: restarts.count for restarts in state.restarts},
        label="reason",
        counter=True,
    ),
    StateMetric("mars:engine_steps", "Steps that ran a forward so far.", lambda state: state.steps),
    StateMetric("vllm:num_preemptions", "Sequences preempted.", lambda state: state.preemptions, counter=True),
    StateMetric(
        "mars:threshold",
        "Threshold of requests that do not set one.",
        lambda state: {class_state.name: class_state.threshold for class_state in state.classes},
        label="service_class",
    ),
    StateMetric("mars:threshold_changes", "Changes of the threshold so far.", lambda state: state.threshold_changes),
    StateMetric(
        "mars:tokens_per_forward",
        "Tokens per forward, by threshold.",
        lambda state: {f"{point.threshold:g}": point.tokens_per_forward for point in state.profile},
        label="threshold",
    ),
    StateMetric(
        "mars:agreement",
        "Share of tokens that autoregressive decoding would also choose.",
        lambda state: {
            f"{point.threshold:g}": point.agreement for point in state.profile if point.agreement is not None
        },
        label="threshold",
    ),
    StateMetric(
        "mars:drafted_tokens",
        "Drafts that were verified, by source.",
        lambda state: {counts.source: counts.drafted for counts in state.drafts},
        label="source",
        counter=True,
    ),
    StateMetric(
        "mars:accepted_draft_tokens",
        "Verified drafts that were right, by source.",
        lambda state: {counts.source: counts.right for counts in state.drafts},
        label="source",
        counter=True,
    ),
    StateMetric(
        "mars:draft_acceptance",
        "Share of the latest predictions that were right, by source.",
        lambda state: {latest.source: latest.acceptance for latest in state.acceptance},
        label="source",
    ),
    StateMetric(
        "mars:expected_draft_acceptance",
        "Acceptance that the card and the probabilities of the latest predictions promise, by source.",
        lambda state: {latest.source: latest.expected for latest in state.acceptance},
        label="source",
    ),
    StateMetric(
        "mars:draft_acceptance_alarm",
        "1 if the acceptance of a source has collapsed, so that the source is off or on trial; otherwise 0.",
        lambda state: {latest.source: latest.alarm for latest in state.acceptance},
        label="source",
    ),
    StateMetric(
        "mars:rehearsal_slow_steps",
        "Steps slower than on the modelled machine so far. With this metric, all times have a modelled step time.",
        lambda state: {state.modelled.name: state.modelled.slow_steps} if state.modelled else {},
        label="machine",
    ),
)


def notice_of(states: Iterable[EngineState]) -> str:
    """Return the sentence that goes with all figures of these engines: the machines whose step times they take, and the
    share of steps that were slower here. Empty if all steps take the time of this machine."""
    steps: Counter[str] = Counter()
    slow_steps: Counter[str] = Counter()
    for state in states:
        if modelled := state.modelled:
            steps[modelled.name] += state.steps
            slow_steps[modelled.name] += modelled.slow_steps
    return "; ".join(
        f"{step_notice(name)} ({slow_steps[name]:,} of {count:,} steps were slower here)"
        for name, count in steps.items()
    )


def warnings_of(states: Iterable[EngineState]) -> tuple[str, ...]:
    """Return a sentence about each source of drafts whose acceptance has collapsed in some of these engines."""
    alarms: dict[str, list[SourceAcceptance]] = {}
    for state in states:
        for latest in state.acceptance:
            if latest.alarm:
                alarms.setdefault(latest.source, []).append(latest)
    return tuple(
        f"{source} are off in {len(collapsed)} {'engine' if len(collapsed) == 1 else 'engines'}: "
        f"{min(collapsed, key=lambda latest: latest.acceptance).figures}"
        for source, collapsed in alarms.items()
    )
