"""The controller: it takes the reports of all replicas and answers each with a directive.

In:    reports, overrides by an operator, the backlog of a batch job, a clock.
Out:   the directive that answers each report; the status of the cluster for operators.
Never: needs state from before a restart, except overrides. Reports and the driver of a batch job restore everything
       else within two heartbeats.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any
from uuid import uuid4

from mars_ray.control.cluster_load import Backlog, ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.batch_job import BatchJob
from mars_ray.control.core.live_view import FrameHistory, LiveReport, RunningJob
from mars_ray.control.core.overrides import Overrides, OverrideStore
from mars_ray.control.core.policy_changes import PolicyChange, PolicyChanges
from mars_ray.control.core.replica_goal import GoalState, desired_replicas
from mars_ray.control.core.replica_registry import ReplicaRegistry
from mars_ray.control.core.status import ClassStatus, ClusterStatus, curve_of
from mars_ray.control.core.threshold_setter import ThresholdSetter
from mars_ray.control.policies.policy import Bounds, Decision, Policy, bounds_of
from mars_ray.control.policies.policy_registry import POLICIES
from mars_ray.control.policies.spare import callers_alone, decide_for_batches, has_batches
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.service_class import BATCH_CLASS
from mars_ray.engine.stats.state import notice_of, warnings_of
from mars_ray.errors import ReportError

log = logging.getLogger(__name__)

DECIDE_EVERY_S = 1.0
HOT = 1.0
"""Share of a replica's time that its demand may take at the cluster's thresholds before the replica gets lower ones."""
COOL = "the replica keeps up at the thresholds of the cluster"


class SteadyClock:
    """A clock that never goes back, built on one that may; call it to get the seconds since it was made.

    It counts only the forward steps of the given clock, because a clock set back by an hour would prolong a lease of
    five seconds by an hour.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._passed_s = 0.0

    def __call__(self) -> float:
        """Return the seconds that have passed."""
        now_s = self._clock()
        self._passed_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return self._passed_s


class Controller:
    """Decides on thresholds when a report arrives, but at most once a second. Not thread-safe.

    `clock` returns seconds and may jump. `unix_clock` is used only for overrides and for the history of the live view.
    `observe_change` gets the policy's changes of thresholds, at a bounded rate.
    """

    def __init__(
        self,
        plan: ControlPlan,
        *,
        policy: Policy[Any] | None = None,
        store: OverrideStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        observe_change: Callable[[PolicyChange], None] = lambda _: None,
    ) -> None:
        settings = plan.settings
        self._plan = plan
        self._policy = policy or POLICIES[settings.policy]
        self._policy_state = self._policy.initial
        self._now_s = SteadyClock(clock)
        self._replicas = ReplicaRegistry(settings.lease_s)
        self._overrides = Overrides(plan, store, unix_clock)
        self._setter = ThresholdSetter(settings.recover_s, self._overrides, self._replicas)
        self._job = BatchJob()
        self._unix_s = unix_clock
        self._history = FrameHistory()
        self._life = uuid4().hex
        self._decided_s: float | None = None
        """Time of the last decision; None makes the next report trigger a decision."""
        self._epoch = self._desired_replicas = 0
        self._goal_state = GoalState()
        self._bounds: Mapping[str, Bounds] = bounds_of(plan, [])
        self._decisions = {name: Decision(bound.ceiling, "no report yet") for name, bound in self._bounds.items()}
        self._hot: dict[str, dict[str, Decision]] = {}
        """Decisions for replicas with more work than the others, by replica and class."""
        self._changes: Counter[str] = Counter()
        self._policy_changes = PolicyChanges(observe_change)

    def handle_report(self, report: ReplicaReport) -> Directive:
        """Take a report and return the directive in force.

        Raises `ReportError` if the classes in the report differ from those in the plan.
        """
        names = {class_state.name for class_state in report.state.classes}
        if names != set(self._decisions):
            raise ReportError(f"the report has the classes {sorted(names)}; it must have {sorted(self._decisions)}.")
        now_s = self._now_s()
        self._replicas.observe(report, now_s)
        if self._decided_s is None or now_s - self._decided_s >= DECIDE_EVERY_S:
            self._decide(now_s)
        return self._directive(report)

    def update_backlog(self, backlog: Backlog, *, paused: bool) -> ClusterStatus:
        """Set the remaining work of a batch job and whether its workers pause; return the status.

        Both hold for up to `batch_job.BACKLOG_S` seconds.
        """
        self._job.update(backlog, self._now_s(), paused=paused)
        return self.status()

    def set_threshold(self, threshold: float, name: str | None, seconds: float | None) -> None:
        """Override the policy for one class, or for all classes if `name` is None.

        The override lasts for `seconds`, or until it is cleared if `seconds` is None. Raises `ConfigError` for an
        unknown class or a value out of range, in which case nothing changes.
        """
        self._overrides.set(threshold, name, seconds)
        self._decided_s = None

    def clear_threshold(self, name: str | None) -> None:
        """Let the policy decide again on one class, or on all classes if `name` is None.

        Raises `ConfigError` for an unknown class.
        """
        self._overrides.clear(name)
        self._decided_s = None

    def live(self, controller: str, after: int) -> LiveReport:
        """Return the report for a live view that has the frames up to `after` from the controller with the id
        `controller`."""
        status = replace(self.status(), replicas=())
        return LiveReport(
            controller=self._life,
            status=status,
            replicas=len(self._replicas),
            frames=self._history.after(after if controller == self._life else 0),
        )

    def job(self) -> RunningJob | None:
        """Return the state of the batch job; None if there is no job."""
        job_state = self._job.state(self._replicas, self._now_s())
        if job_state is None:
            return None
        engine_states = [replica.state for replica in self._replicas.status(0.0)]
        return RunningJob(
            name="",
            job=job_state,
            tokens=sum(state.tokens for state in engine_states),
            workers=len(engine_states),
            late_s=max(decision.late_s for decision in self._decisions.values()),
            paused=self._job.is_paused(self._now_s()),
            notice="; ".join(filter(None, (notice_of(engine_states), *warnings_of(engine_states)))),
        )

    def thresholds(self) -> dict[str, float]:
        """Return the cluster's threshold of each class. Replicas with more work may have lower thresholds."""
        return {name: decision.threshold for name, decision in self._decisions.items()}

    def status(self) -> ClusterStatus:
        """Return the state of the cluster and the decisions, for operators."""
        requests_s = self._replicas.requests_s()
        replicas = self._replicas.status(self._now_s())
        load = self._replicas.load()
        return ClusterStatus(
            policy=self._plan.settings.policy,
            epoch=self._epoch,
            desired_replicas=self._desired_replicas,
            replicas=replicas,
            notice=notice_of(replica.state for replica in replicas),
            warnings=warnings_of(replica.state for replica in replicas),
            price_per_hour=load.price_per_hour,
            price_per_million_tokens=load.price_per_million_tokens(self._replicas.tokens_s()),
            curve=curve_of(load, self._plan),
            classes=tuple(
                ClassStatus(
                    name=name,
                    threshold=decision.threshold,
                    floor=self._bounds[name].floor,
                    floor_asked=self._bounds[name].operator_floor,
                    floor_reason=self._bounds[name].floor_reason,
                    ceiling=self._bounds[name].ceiling,
                    reason=decision.reason,
                    requests_s=requests_s.get(name, 0.0),
                    changes=self._changes[name],
                    override=self._overrides.get(name),
                    late_s=decision.late_s,
                )
                for name, decision in self._decisions.items()
            ),
        )

    def _directive(self, report: ReplicaReport) -> Directive:
        decisions = self._decisions | self._hot.get(report.replica, {})
        return Directive(
            replica=report.replica,
            answers=report.number,
            controller=self._life,
            thresholds={name: decision.threshold for name, decision in decisions.items()},
            lease_s=self._plan.settings.lease_s,
            desired_replicas=self._desired_replicas,
            paused=self._job.is_paused(self._now_s()),
        )

    def _decide(self, now_s: float) -> None:
        for replica in self._replicas.forget_silent(now_s):
            log.warning("replica %s has stopped reporting", replica)
            self._setter.forget(replica)
        dt_s = 0.0 if self._decided_s is None else now_s - self._decided_s
        self._decided_s = now_s
        self._epoch += 1
        self._bounds = bounds_of(self._plan, self._replicas.profiles())
        load = replace(self._replicas.load(), job=self._job.state(self._replicas, now_s))
        callers = self._callers(load)
        decisions, self._policy_state = self._policy.decide(self._plan, callers, self._bounds, self._policy_state, dt_s)
        if callers is not load and self._plan.settings.policy != "fixed":
            decisions[BATCH_CLASS] = decide_for_batches(load, self._bounds[BATCH_CLASS], decisions)
        before = self._decisions
        self._decisions = self._setter.apply(None, decisions, self._bounds, now_s)
        for name, after in self._decisions.items():
            if after.threshold != before[name].threshold:
                self._note_change(name, before[name].threshold, after, load)
        self._policy_changes.report(now_s)
        self._hot = self._decide_hot(now_s)
        self._history.observe(self._replicas.status(now_s), now_s, self._unix_s())
        lowered = any(decision.threshold < self._bounds[name].ceiling for name, decision in decisions.items())
        # The worst of many replicas misses a promise that the cluster keeps.
        of_cluster = replace(self._replicas.load(latency=fmean), job=load.job)
        self._desired_replicas, self._goal_state = desired_replicas(
            self._plan, of_cluster, self._goal_state, dt_s, lowered=lowered
        )

    def _note_change(self, name: str, before: float, after: Decision, load: ClusterLoad) -> None:
        self._changes[name] += 1
        log.info("threshold of class %s: %g -> %g: %s", name, before, after.threshold, after.reason)
        if self._overrides.get(name) is None:  # what operators set is recorded where they set it
            change = PolicyChange(
                service_class=name,
                before=before,
                after=after.threshold,
                lowest=after.threshold,
                changes=1,
                reason=after.reason,
                load=None if load.speed is None else load.share_of_capacity(self._plan.ceiling),
            )
            self._policy_changes.add(change)

    def _callers(self, load: ClusterLoad) -> ClusterLoad:
        """Return the load that the policy decides on: without the rows of batches, if batches run next to callers."""
        return callers_alone(load) if not self._policy.uniform and has_batches(load) else load

    def _decide_hot(self, now_s: float) -> dict[str, dict[str, Decision]]:
        """Return the decisions for replicas that have more work than the others."""
        hot: dict[str, dict[str, Decision]] = {}
        if len(self._replicas) < 2 or self._policy.uniform:
            return hot
        job = self._job.state(self._replicas, self._now_s())
        for replica, own in self._replicas.loads():
            all_work = replace(own, job=job)
            load = self._callers(all_work)
            shares = (load.share_with_queue(name, decision.threshold) for name, decision in self._decisions.items())
            if load.speed is not None and sum(shares) > HOT:
                decisions, _ = self._policy.decide(self._plan, load, self._bounds, self._policy_state, 0.0)
                if load is not all_work:  # batches lower their threshold for their own deadline alone
                    decisions[BATCH_CLASS] = self._decisions[BATCH_CLASS]
            elif self._setter.has(replica):
                decisions = {name: Decision(bound.ceiling, COOL) for name, bound in self._bounds.items()}
            else:
                continue
            applied = self._setter.apply(replica, decisions, self._bounds, now_s)
            hot[replica] = {
                name: decision
                for name, decision in applied.items()
                if decision.threshold < self._decisions[name].threshold
            }
        return hot
