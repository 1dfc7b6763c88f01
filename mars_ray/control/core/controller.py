"""The controller: reports of all replicas in, a directive for each out.

In:    reports, orders of an operator, the backlog of a batch job, a clock.
Out:   the answer to each report; the state of the cluster for people.
Never: needs what it knew before it was restarted, except for overrides: reports, and the driver of a batch job, rebuild
       the rest in two heartbeats.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from mars_ray.control.backlog import Backlog, Pace
from mars_ray.control.core.override import Override
from mars_ray.control.demand import DemandMeter
from mars_ray.control.directive import Directive
from mars_ray.control.laws.limits import Bounds, bounds_of
from mars_ray.control.laws.load import Load, together
from mars_ray.control.laws.policy import ALIKE, POLICIES, Aim, Law, Memory
from mars_ray.control.laws.smoother import Smoother
from mars_ray.control.laws.speed import speed_of
from mars_ray.control.report import ReplicaReport
from mars_ray.control.settings import ControlPlan
from mars_ray.control.steady_clock import SteadyClock
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import ConfigError, ReportError

log = logging.getLogger(__name__)

DECIDE_EVERY_S = 1.0
WELL_USED = 0.8
"""Share of a replica's time that demand should take at full quality, where there may be as many as it needs."""
HOT = 1.0
"""A replica whose own demand takes more than all of its time at the threshold of the others gets a lower one."""


class OverrideStore(Protocol):
    """Where overrides outlive the controller."""

    def load(self) -> dict[str, Override]:
        """Return what was saved last."""

    def save(self, overrides: dict[str, Override]) -> None:
        """Replace what was saved."""


class NoStore:
    """Forgets."""

    def load(self) -> dict[str, Override]:
        """Return nothing."""
        return {}

    def save(self, overrides: dict[str, Override]) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica as the controller sees it."""

    replica: str
    age_s: float
    """Since its last report."""
    state: EngineState
    """When it reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """One class of service as the controller sees it."""

    name: str
    threshold: float
    floor: float
    floor_asked: float
    """What the operator set; the floor in force may be higher."""
    floor_reason: str
    """Why it is; empty where it is not."""
    ceiling: float
    reason: str
    requests_s: float
    changes: int
    """Of its threshold, since the controller started."""
    override: Override | None
    late_s: float
    """So long after its deadline a batch job ends even at the floor; 0 for as long as it can be in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What the controller knows and decided."""

    policy: str
    epoch: int
    desired_replicas: int
    replicas: tuple[ReplicaStatus, ...]
    classes: tuple[ClassStatus, ...]


class Controller:
    """Decides once a second, when a report comes. Not thread-safe.

    `clock` gives seconds and may jump; `unix_clock` is for overrides alone.
    """

    def __init__(
        self,
        plan: ControlPlan,
        *,
        law: Law | None = None,
        store: OverrideStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._plan, self._law = plan, law or POLICIES[plan.settings.policy]
        self._now_s, self._unix_s, self._store = SteadyClock(clock), unix_clock, store or NoStore()
        self._meters: dict[str, DemandMeter] = {}
        self._seen_s: dict[str, float] = {}
        self._memory: Memory = {}
        self._smoothers: dict[tuple[str, str], Smoother] = {}
        """By class, and by replica within it; the cluster's own under the replica "" ."""
        self._decided_s: float | None = None
        self._epoch = self._desired_replicas = 0
        self._bounds: Mapping[str, Bounds] = bounds_of(plan, [])
        self._aims = {name: Aim(each.ceiling, "nothing reported yet") for name, each in self._bounds.items()}
        self._hot: dict[str, dict[str, Aim]] = {}
        self._changes: Counter[str] = Counter()
        self._overrides = self._stored()
        self._backlog: Backlog | None = None
        self._told_s = 0.0
        self._paused = False

    def answer(self, report: ReplicaReport) -> Directive:
        """Take a report and say what holds. Raises `ReportError` for a report of another kind of engine."""
        names = {each.name for each in report.state.classes}
        if names != set(self._aims):
            raise ReportError(f"the report has the classes {sorted(names)}; here are {sorted(self._aims)}.")
        now_s = self._now_s()
        meter = self._meters.get(report.replica)
        if meter is None:
            self._meters[report.replica], self._seen_s[report.replica] = DemandMeter(report), now_s
        elif meter.observe(report):
            self._seen_s[report.replica] = now_s
        if self._decided_s is None or now_s - self._decided_s >= DECIDE_EVERY_S:
            self._decide(now_s)
        aims = self._aims | self._hot.get(report.replica, {})
        return Directive(
            replica=report.replica,
            answers=report.number,
            epoch=self._epoch,
            thresholds={name: aim.threshold for name, aim in aims.items()},
            reasons={name: aim.reason for name, aim in aims.items()},
            lease_s=self._plan.settings.lease_s,
            desired_replicas=self._desired_replicas,
            paused=self._paused,
        )

    def tell(self, backlog: Backlog, *, paused: bool) -> None:
        """Take what is left of a batch job, and whether its workers are to take no new rows. Holds until told again."""
        self._backlog, self._told_s, self._paused = backlog, self._now_s(), paused

    def set_threshold(self, threshold: float, name: str | None, seconds: float | None) -> None:
        """Override what the policy says, of one class or of all, for so long or until cleared.

        Raises `ConfigError` for an unknown class or a value out of range; then nothing changes.
        """
        names = self._named(name)
        for each in names:
            floor, ceiling = self._plan.floor(each), self._plan.ceiling
            if not floor <= threshold <= ceiling:
                raise ConfigError(f"threshold is {threshold}; class {each} allows {floor:g} to {ceiling:g}.")
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ConfigError(f"the override is to last {seconds} s; give more than 0.")
        ends = None if seconds is None else self._unix_s() + seconds
        self._keep(self._overrides | {each: Override(threshold, ends) for each in names})

    def clear_threshold(self, name: str | None) -> None:
        """Let the policy decide again, of one class or of all. Raises `ConfigError` for an unknown class."""
        gone = self._named(name)
        self._keep({each: held for each, held in self._overrides.items() if each not in gone})

    def status(self) -> ClusterStatus:
        """Return what is known and decided, for people."""
        now_s = self._now_s()
        demands = together([each for meter in self._meters.values() for each in meter.demand()])
        requests_s = {each.name: each.requests_s for each in demands}
        return ClusterStatus(
            policy=self._plan.settings.policy,
            epoch=self._epoch,
            desired_replicas=self._desired_replicas,
            replicas=tuple(
                ReplicaStatus(replica=replica, age_s=now_s - self._seen_s[replica], state=meter.last.state)
                for replica, meter in self._meters.items()
            ),
            classes=tuple(
                ClassStatus(
                    name=name,
                    threshold=aim.threshold,
                    floor=self._bounds[name].floor,
                    floor_asked=self._bounds[name].asked,
                    floor_reason=self._bounds[name].floor_reason,
                    ceiling=self._bounds[name].ceiling,
                    reason=aim.reason,
                    requests_s=requests_s.get(name, 0.0),
                    changes=self._changes[name],
                    override=self._overrides.get(name),
                    late_s=aim.late_s,
                )
                for name, aim in self._aims.items()
            ),
        )

    def _named(self, name: str | None) -> list[str]:
        if name is not None and name not in self._aims:
            raise ConfigError(f"there is no class {name!r}; there are {', '.join(self._aims)}.")
        return list(self._aims) if name is None else [name]

    def _stored(self) -> dict[str, Override]:
        """Return the overrides of before that still make sense."""
        stored = self._store.load()
        return {
            name: held
            for name, held in stored.items()
            if name in self._aims and self._plan.floor(name) <= held.threshold <= self._plan.ceiling
        }

    def _keep(self, overrides: dict[str, Override]) -> None:
        self._store.save(overrides)  # first: what an operator was told is set must be
        self._overrides = overrides
        self._decided_s = None

    def _decide(self, now_s: float) -> None:
        self._forget_silent(now_s)
        dt_s = 0.0 if self._decided_s is None else now_s - self._decided_s
        self._decided_s, self._epoch = now_s, self._epoch + 1
        self._bounds = bounds_of(self._plan, [meter.last.state.profile for meter in self._meters.values()])
        whole = replace(_load(list(self._meters.values())), pace=self._pace(now_s))
        aims, self._memory = self._law(self._plan, whole, self._bounds, self._memory, dt_s)
        before = self._aims
        self._aims = {name: self._settled("", name, aims[name], now_s) for name in self._bounds}
        for name, aim in self._aims.items():
            if aim.threshold != before[name].threshold:
                self._changes[name] += 1
                log.info("threshold of class %s: %g -> %g: %s", name, before[name].threshold, aim.threshold, aim.reason)
        self._hot = self._hot_replicas(now_s)
        self._desired_replicas = _desired(whole, self._plan)

    def _pace(self, now_s: float) -> Pace | None:
        if self._backlog is None or not self._meters:
            return None
        left_s, meters = self._backlog.seconds, self._meters.values()
        thresholds = [each.threshold for meter in meters for each in meter.last.state.classes]
        rates = [meter.tokens_s() for meter in meters]
        known = [each for each in rates if each is not None]
        return Pace(
            backlog=replace(self._backlog, seconds=None if left_s is None else left_s - (now_s - self._told_s)),
            threshold=sum(thresholds) / len(thresholds),
            tokens_s=sum(known) if len(known) == len(rates) else None,
        )

    def _forget_silent(self, now_s: float) -> None:
        for replica, seen_s in list(self._seen_s.items()):
            if now_s - seen_s > self._plan.settings.lease_s:
                log.warning("replica %s is silent", replica)
                del self._seen_s[replica], self._meters[replica]
                self._smoothers = {key: each for key, each in self._smoothers.items() if key[0] != replica}

    def _settled(self, replica: str, name: str, aim: Aim, now_s: float) -> Aim:
        """Return the aim as it takes force: an override, or what is smooth and within bounds."""
        key, bounds = (replica, name), self._bounds[name]
        smoother = self._smoothers.get(key)
        if smoother is None:
            # Begin where the replicas are: a new controller must not jump.
            in_force = [
                each.threshold
                for meter in self._meters.values()
                for each in meter.last.state.classes
                if each.name == name and replica in ("", meter.last.replica)
            ]
            start = min(in_force, default=bounds.ceiling)
            smoother = self._smoothers[key] = Smoother(start, now_s, self._plan.settings.recover_s)
        held = self._overrides.get(name)
        if held and held.ends_unix_s is not None and held.ends_unix_s <= self._unix_s():
            del self._overrides[name]
            held = None
        threshold = smoother.follow(aim.threshold, now_s)  # under an override too: when it ends, this is what holds
        if held:
            return replace(aim, threshold=held.threshold, reason="set by an operator")
        reason = aim.reason if threshold == aim.threshold else f"{aim.reason}; it rises once that lasts"
        if threshold < bounds.floor:
            reason = "the floor"
        return replace(aim, threshold=min(max(threshold, bounds.floor), bounds.ceiling), reason=reason)

    def _hot_replicas(self, now_s: float) -> dict[str, dict[str, Aim]]:
        """Return the thresholds of replicas that have more to do than the others."""
        found: dict[str, dict[str, Aim]] = {}
        if len(self._meters) < 2 or self._law in ALIKE:
            return found
        for replica, meter in self._meters.items():
            own = _load([meter])
            hot = own.speed is not None and sum(own.now(n, aim.threshold) for n, aim in self._aims.items()) > HOT
            if not hot and (replica, next(iter(self._aims))) not in self._smoothers:
                continue
            aims, _ = self._law(self._plan, own, self._bounds, self._memory, 0.0)
            if not hot:
                aims = {name: replace(aims[name], threshold=self._bounds[name].ceiling) for name in aims}
            settled = {name: self._settled(replica, name, aims[name], now_s) for name in self._aims}
            found[replica] = {name: aim for name, aim in settled.items() if aim.threshold < self._aims[name].threshold}
        return found


def _load(meters: list[DemandMeter]) -> Load:
    states = [meter.last.state for meter in meters]
    firsts = [state.ttft_p95_s for state in states if state.ttft_p95_s is not None]
    paces = [state.itl_p95_s for state in states if state.itl_p95_s is not None]
    return Load(
        replicas=len(meters),
        classes=together([demand for meter in meters for demand in meter.demand()]),
        speed=speed_of(states),
        rows=sum(state.rows for state in states),
        ttft_p95_s=max(firsts, default=None),
        itl_p95_s=max(paces, default=None),
    )


def _desired(load: Load, plan: ControlPlan) -> int:
    """Return the replicas that demand needs at full quality: a lowered threshold must not hide it."""
    if load.speed is None:
        return 0
    return ceil(sum(load.lasting(each.name, plan.ceiling) for each in load.classes) / WELL_USED)
