"""The controller: reports of all replicas in, a directive for each out.

In:    reports, overrides of an operator, the backlog of a batch job, a clock.
Out:   the directive that answers each report; the state of the cluster for people.
Never: needs what it knew before it was restarted, except for overrides: reports, and the driver of a batch job, rebuild
       the rest in two heartbeats.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from typing import Any
from uuid import uuid4

from mars_ray.control.cluster_load import Backlog, BatchJobState, ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.live_view import FrameHistory, LiveReport, RunningJob, curve_of
from mars_ray.control.core.overrides import NullStore, Overrides, OverrideStore
from mars_ray.control.core.replica_registry import ReplicaRegistry
from mars_ray.control.core.status import ClassStatus, ClusterStatus
from mars_ray.control.core.threshold_setter import ThresholdSetter
from mars_ray.control.policies.bounds import Bounds, bounds_of
from mars_ray.control.policies.policy import Decision, Policy
from mars_ray.control.policies.policy_registry import POLICIES
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.control.steady_clock import SteadyClock
from mars_ray.errors import ReportError


class BatchJob:
    """The batch job that the replicas of a controller work on, if they do."""

    def __init__(self) -> None:
        self._backlog: Backlog | None = None
        self._updated_s = 0.0
        self.paused = False
        """Whether workers are to take no new rows."""

    def update(self, backlog: Backlog, now_s: float, *, paused: bool) -> None:
        """Take what the driver says; it holds until the next time."""
        self._backlog, self._updated_s, self.paused = backlog, now_s, paused

    def state(self, replicas: ReplicaRegistry, now_s: float) -> BatchJobState | None:
        """Return how the job stands now; None where there is no job, or no worker."""
        if self._backlog is None or not len(replicas):
            return None
        left_s, thresholds = self._backlog.seconds, replicas.thresholds()
        return BatchJobState(
            backlog=replace(self._backlog, seconds=None if left_s is None else left_s - (now_s - self._updated_s)),
            threshold=sum(thresholds) / len(thresholds),
            tokens_s=replicas.tokens_s(),
        )


log = logging.getLogger(__name__)

DECIDE_EVERY_S = 1.0
WELL_USED = 0.8
"""Share of a replica's time that demand should take at full quality, where there may be as many as it needs."""
HOT = 1.0
"""A replica whose own demand takes more than all of its time at the threshold of the others gets a lower one."""
COOL = "it has no more to do than it can do at the threshold of the others"


class Controller:
    """Decides once a second, when a report comes. Not thread-safe.

    `clock` gives seconds and may jump; `unix_clock` is for overrides alone.
    """

    def __init__(
        self,
        plan: ControlPlan,
        *,
        policy: Policy[Any] | None = None,
        store: OverrideStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        settings = plan.settings
        self._plan, self._policy = plan, policy or POLICIES[settings.policy]
        self._policy_state = self._policy.initial
        self._now_s = SteadyClock(clock)
        self._replicas = ReplicaRegistry(settings.lease_s)
        self._overrides = Overrides(plan, store or NullStore(), unix_clock)
        self._setter = ThresholdSetter(settings.recover_s, self._overrides, self._replicas)
        self._job = BatchJob()
        self._unix_s, self._history, self._life = unix_clock, FrameHistory(), uuid4().hex
        self._decided_s: float | None = None
        """When the last decision was made; None makes the next report decide anew."""
        self._epoch = self._desired_replicas = 0
        self._bounds: Mapping[str, Bounds] = bounds_of(plan, [])
        self._decisions = {name: Decision(each.ceiling, "nothing reported yet") for name, each in self._bounds.items()}
        self._hot: dict[str, dict[str, Decision]] = {}
        """Decisions for replicas that have more to do than the others, by replica and class."""
        self._changes: Counter[str] = Counter()

    def handle_report(self, report: ReplicaReport) -> Directive:
        """Take a report and return the directive that holds. Raises `ReportError` for one of another kind of engine."""
        names = {each.name for each in report.state.classes}
        if names != set(self._decisions):
            raise ReportError(f"the report has the classes {sorted(names)}; here are {sorted(self._decisions)}.")
        now_s = self._now_s()
        self._replicas.observe(report, now_s)
        if self._decided_s is None or now_s - self._decided_s >= DECIDE_EVERY_S:
            self._decide(now_s)
        return self._directive(report)

    def update_backlog(self, backlog: Backlog, *, paused: bool) -> None:
        """Set the remaining work of a batch job, and whether its workers pause. Valid until the next call."""
        self._job.update(backlog, self._now_s(), paused=paused)

    def set_threshold(self, threshold: float, name: str | None, seconds: float | None) -> None:
        """Override the policy for one class or all, for some seconds or until cleared.

        Raises `ConfigError` for an unknown class or a value out of range; then nothing changes.
        """
        self._overrides.set(threshold, name, seconds)
        self._decided_s = None

    def clear_threshold(self, name: str | None) -> None:
        """Let the policy decide again, of one class or of all. Raises `ConfigError` for an unknown class."""
        self._overrides.clear(name)
        self._decided_s = None

    def live(self, controller: str, after: int) -> LiveReport:
        """Return what a live view shows that knows the frames up to `after` of this life of the controller."""
        status = replace(self.status(), replicas=())
        return LiveReport(
            controller=self._life,
            status=status,
            replicas=len(self._replicas),
            curve=curve_of(self._replicas.load(), self._plan),
            frames=self._history.after(after if controller == self._life else 0),
        )

    def job(self) -> RunningJob | None:
        """Return how the batch job stands; None where there is none."""
        found = self._job.state(self._replicas, self._now_s())
        if found is None:
            return None
        states = [each.state for each in self._replicas.status(0.0)]
        return RunningJob(
            name="",
            job=found,
            tokens=sum(each.tokens for each in states),
            workers=len(states),
            late_s=max(each.late_s for each in self._decisions.values()),
            paused=self._job.paused,
        )

    def thresholds(self) -> dict[str, float]:
        """Return the threshold of each class, for replicas that have no more to do than others."""
        return {name: decision.threshold for name, decision in self._decisions.items()}

    def status(self) -> ClusterStatus:
        """Return state and decisions, for operators."""
        requests_s = self._replicas.requests_s()
        return ClusterStatus(
            policy=self._plan.settings.policy,
            epoch=self._epoch,
            desired_replicas=self._desired_replicas,
            replicas=self._replicas.status(self._now_s()),
            classes=tuple(
                ClassStatus(
                    name=name,
                    threshold=decision.threshold,
                    floor=self._bounds[name].floor,
                    floor_asked=self._bounds[name].asked,
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
            epoch=self._epoch,
            thresholds={name: decision.threshold for name, decision in decisions.items()},
            reasons={name: decision.reason for name, decision in decisions.items()},
            lease_s=self._plan.settings.lease_s,
            desired_replicas=self._desired_replicas,
            paused=self._job.paused,
        )

    def _decide(self, now_s: float) -> None:
        for replica in self._replicas.forget_silent(now_s):
            log.warning("replica %s is silent", replica)
            self._setter.forget(replica)
        dt_s = 0.0 if self._decided_s is None else now_s - self._decided_s
        self._decided_s, self._epoch = now_s, self._epoch + 1
        self._bounds = bounds_of(self._plan, self._replicas.profiles())
        load = replace(self._replicas.load(), job=self._job.state(self._replicas, now_s))
        decisions, self._policy_state = self._policy.decide(self._plan, load, self._bounds, self._policy_state, dt_s)
        before = self._decisions
        self._decisions = self._setter.apply(None, decisions, self._bounds, now_s)
        for name, after in self._decisions.items():
            if after.threshold != before[name].threshold:
                self._changes[name] += 1
                log.info(
                    "threshold of class %s: %g -> %g: %s", name, before[name].threshold, after.threshold, after.reason
                )
        self._hot = self._decide_hot(now_s)
        self._history.observe(self._replicas.status(now_s), now_s, self._unix_s())
        self._desired_replicas = _desired_replicas(load, self._plan)

    def _decide_hot(self, now_s: float) -> dict[str, dict[str, Decision]]:
        """Return the decisions for replicas that have more to do than the others."""
        found: dict[str, dict[str, Decision]] = {}
        if len(self._replicas) < 2 or self._policy.uniform:
            return found
        for replica, load in self._replicas.loads():
            shares = (load.share_with_queue(name, each.threshold) for name, each in self._decisions.items())
            if load.speed is not None and sum(shares) > HOT:
                decisions, _ = self._policy.decide(self._plan, load, self._bounds, self._policy_state, 0.0)
            elif self._setter.has(replica):
                decisions = {name: Decision(each.ceiling, COOL) for name, each in self._bounds.items()}
            else:
                continue
            applied = self._setter.apply(replica, decisions, self._bounds, now_s)
            found[replica] = {
                name: each for name, each in applied.items() if each.threshold < self._decisions[name].threshold
            }
        return found


def _desired_replicas(load: ClusterLoad, plan: ControlPlan) -> int:
    """Return the replicas that demand needs at full quality: a lowered threshold must not hide it."""
    if load.speed is None:
        return 0
    return ceil(sum(load.arriving_share(each.name, plan.ceiling) for each in load.classes) / WELL_USED)
