"""Replicas and a controller on a bad network, ten thousand times: what must always hold, and what must come back.

Messages are late, twice, in any order, or gone. Replicas die, come, hang; controllers are killed and made anew; every
clock jumps. After each event the thresholds in force are checked, and at the end, when faults and load are gone, all
replicas must be back at the ceiling.
"""

import heapq
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest

from mars_ray.control.control_settings import ControlPlan, ControlSettings, PolicyName, SloSettings
from mars_ray.control.core.controller import Controller
from mars_ray.control.core.lease import Lease
from mars_ray.control.demand import RATE_S
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import ReportError
from tests.control.control_samples import STEP_TIME, class_state, engine_state, point
from tests.samples import seeds

SCHEDULES, GROUPS = 10_000, 100
FAULTS_S = 8.0
LEASE_S, RECOVER_S, HEARTBEATS_S = 2.0, 2.0, 3.0
CALM_S = LEASE_S + RECOVER_S + HEARTBEATS_S
"""So long after faults and load ended all is as if nothing had been."""
MORE_S = {"capacity": RATE_S}
"""Seconds more for a policy that remembers: until no arrival counts any more."""
JUMP_S = (-3600.0, -2.0, -0.5, 0.7, 2.0, 3600.0)
CEILING = 0.95
POLICIES: tuple[PolicyName, ...] = ("fixed", "capacity")
WEIGHTS = (1, 8)
PROFILE = tuple(
    point(threshold, [share ** (k + 1) for k in range(3)]) for threshold, share in ((1.0, 0.0), (0.95, 0.4), (0.5, 0.9))
)
CLASSES = (
    (ServiceClass(floor=0.5),),
    (ServiceClass(name="gold", floor=0.8, priority=1), ServiceClass(name="batch", floor=0.5)),
)


@cache
def plan_of(policy: PolicyName, classes: int) -> ControlPlan:
    return ControlPlan(
        settings=ControlSettings(
            policy=policy,
            slo=SloSettings(ttft_ms=300),
            lease_s=LEASE_S,
            recover_s=RECOVER_S,
        ),
        ceiling=CEILING,
        classes=CLASSES[classes],
    )


class FaultyClock:
    """Jumps. `lost_s` is how long passed unseen because it jumped back: no clock on top of it can know of that."""

    def __init__(self, true_s: Callable[[], float]) -> None:
        self._true_s, self._offset_s = true_s, 10_000.0
        self._read_true_s, self._read_s, self.lost_s = true_s(), true_s() + self._offset_s, 0.0

    def jump(self, seconds: float) -> None:
        self._offset_s += seconds

    def __call__(self) -> float:
        true_s = self._true_s()
        now_s = true_s + self._offset_s
        self.lost_s += max(0.0, (true_s - self._read_true_s) - max(0.0, now_s - self._read_s))
        self._read_true_s, self._read_s = true_s, now_s
        return now_s


@dataclass(slots=True)
class Caller:
    """What callers do to one replica; counts only go up."""

    arrived: int = 0
    waiting: int = 0
    running: int = 0

    def second(self, chance: random.Random, busy: bool) -> None:
        came = chance.choice((0, 1, 2, 12)) if busy else 0
        self.arrived += came
        self.waiting = min(60, self.waiting + came - self.running) if busy else 0
        self.waiting = max(0, self.waiting)
        self.running = min(4, came + self.waiting) if busy else 0


class Replica:
    """A lease, what its engine counts, and a book of what it may follow."""

    def __init__(self, name: str, world: "World") -> None:
        self.name, self.world = name, world
        self.clock = FaultyClock(lambda: world.now_s)
        self.lease = Lease(name, world.plan, self.clock)
        self.thresholds = {each.name: CEILING for each in world.plan.classes}
        self.callers = {name: Caller() for name in self.thresholds}
        self.made: dict[int, tuple[float, float]] = {}
        """By number of report: true time, and what the clock had lost by then."""
        self.newest = 0
        """The newest report whose answer was taken."""
        self.stuck_until_s = 0.0

    def heartbeat(self, busy: bool) -> ReplicaReport:
        for caller in self.callers.values():
            caller.second(self.world.chance, busy)
        state = engine_state(
            *(
                class_state(
                    name,
                    threshold=self.thresholds[name],
                    running=caller.running,
                    waiting=caller.waiting,
                    arrived=caller.arrived,
                    prompt_tokens=20 * caller.arrived,
                    ended=caller.arrived,
                    tokens=60 * caller.arrived,
                )
                for name, caller in self.callers.items()
            ),
            profile=PROFILE,
            step_time=STEP_TIME,
            ttft_p95_s=self.world.chance.choice((0.05, 0.3, 3.0)) if busy else None,
        )
        report = self.lease.report(state)
        self.made[report.number] = (self.world.now_s, self.clock.lost_s)
        self.follow(report)
        return report

    def follow(self, report: ReplicaReport) -> None:
        directive = self.lease.in_force(report)
        assert set(directive.thresholds) == set(self.thresholds)
        self.thresholds = dict(directive.thresholds)

    def take(self, directive: Directive) -> None:
        answers = directive.answers
        if self.lease.take(directive):
            assert directive.replica == self.name and answers in self.made, "it took what is not its own"
            assert answers > self.newest, "it took an old answer after a newer"
            assert all(self.world.allows(name, value) for name, value in directive.thresholds.items()), "out of bounds"
            self.newest = answers
            self.thresholds = dict(directive.thresholds)

    def check(self) -> None:
        assert all(self.world.allows(name, value) for name, value in self.thresholds.items()), "out of bounds"
        if held := self.lease.directive:
            made_s, lost_s = self.made[held.answers]
            age_s = self.world.now_s - made_s - (self.clock.lost_s - lost_s)
            assert age_s <= held.lease_s + 1e-6, f"it follows a directive that is {age_s:.1f} s old"


class World:
    """One fault schedule."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self.plan = plan_of(*self.chance.choices(POLICIES, WEIGHTS), self.chance.choice((0, 0, 1)))
        self._floors = {each.name: self.plan.floor(each.name) for each in self.plan.classes}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0
        self.replicas: dict[str, Replica] = {}
        self._clock = FaultyClock(lambda: self.now_s)
        self._start_controller()
        for _ in range(self.chance.randint(1, 2)):
            self._start_replica()
        self._drop, self._twice, self._slow = (self.chance.choice((0.0, 0.1, 0.4)) for _ in range(3))
        self._after(self.chance.uniform(0.5, 2.0), self._fault)

    def allows(self, name: str, threshold: float) -> bool:
        return self._floors[name] <= threshold <= CEILING

    def run(self) -> None:
        end_s = FAULTS_S + CALM_S + MORE_S.get(self.plan.settings.policy, 0.0)
        while self._events[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            for each in self.replicas.values():
                each.check()
        assert self.replicas
        for each in self.replicas.values():
            assert set(each.thresholds.values()) == {CEILING}, f"{each.name} is not back at the ceiling"
            assert each.lease.directive is not None, f"{each.name} hears nothing of the controller"

    @property
    def _faulty(self) -> bool:
        return self.now_s < FAULTS_S

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._made += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._made, event))

    def _start_controller(self) -> None:
        self._controller: Controller | None = Controller(self.plan, clock=self._clock, unix_clock=self._clock)

    def _start_replica(self) -> None:
        replica = Replica(f"r{self._made}", self)
        self.replicas[replica.name] = replica
        self._after(self.chance.random(), lambda: self._heartbeat(replica))

    def _heartbeat(self, replica: Replica) -> None:
        if self.replicas.get(replica.name) is not replica:
            return  # it died
        if self.now_s >= replica.stuck_until_s:
            report = replica.heartbeat(busy=self._faulty)
            self._send(lambda: self._answer(replica, report))
        self._after(1.0, lambda: self._heartbeat(replica))

    def _send(self, delivery: Callable[[], None]) -> None:
        if not self._faulty:
            self._after(0.01, delivery)
            return
        for _ in range(2 if self.chance.random() < self._twice else 1):
            if self.chance.random() >= self._drop:
                slow = self.chance.random() < self._slow
                delay_s = self.chance.uniform(0.0, 2 * LEASE_S if slow else 0.05)
                if self.now_s + delay_s < FAULTS_S:  # what would come later is lost
                    self._after(delay_s, delivery)

    def _answer(self, replica: Replica, report: ReplicaReport) -> None:
        if self._controller is None:
            return
        directive = self._controller.handle_report(report)
        assert directive.replica == report.replica and directive.answers == report.number
        if self._faulty and self.chance.random() < 0.03:
            directive = self._spoiled(directive)
        self._send(lambda: replica.take(directive))

    def _spoiled(self, directive: Directive) -> Directive:
        """What another version, or a message gone astray, might say."""
        names = list(directive.thresholds)
        return self.chance.choice(
            (
                lambda: replace(directive, replica="somebody"),
                lambda: replace(directive, answers=directive.answers + 100),
                lambda: replace(directive, thresholds=dict.fromkeys(names, 0.1)),
                lambda: replace(directive, thresholds=dict.fromkeys(names, 1.0)),
                lambda: replace(directive, thresholds={names[0]: CEILING, "unknown": 0.9}),
                lambda: replace(directive, thresholds={}),
            )
        )()

    def _fault(self) -> None:
        if not self._faulty:
            if self._controller is None:
                self._start_controller()
            return
        replica = self.chance.choice(list(self.replicas.values()))
        kind = self.chance.randrange(8)
        if kind == 0 and len(self.replicas) > 1:
            del self.replicas[replica.name]
        elif kind == 1 and len(self.replicas) < 3:
            self._start_replica()
        elif kind == 2:
            replica.stuck_until_s = min(FAULTS_S, self.now_s + self.chance.uniform(1.0, 3 * LEASE_S))
        elif kind == 3:
            self._controller = None
        elif kind == 4 or self._controller is None:
            self._start_controller()
        elif kind == 5:
            self._clock.jump(self.chance.choice(JUMP_S))
        elif kind == 6:
            replica.clock.jump(self.chance.choice(JUMP_S))
        else:
            self._malformed(replica)
        self._after(self.chance.uniform(0.3, 2.5), self._fault)

    def _malformed(self, replica: Replica) -> None:
        """A report that cannot be is refused by whoever makes or reads it, and changes nothing."""
        name = next(iter(replica.thresholds))
        bad = self.chance.choice((float("nan"), -1.0, float("inf")))
        with pytest.raises(ReportError):
            state = engine_state(class_state(name, running=bad))
            ReplicaReport(replica=replica.name, number=10**6, seconds=0.0, state=state)
        if self._controller is not None:
            before = self._controller.status()
            foreign = ReplicaReport(replica="odd", number=1, seconds=0.0, state=engine_state(class_state("foreign")))
            with pytest.raises(ReportError):
                self._controller.handle_report(foreign)
            after = self._controller.status()
            assert (after.classes, len(after.replicas)) == (before.classes, len(before.replicas))


@pytest.mark.parametrize("group", seeds(GROUPS, quick=1))
def test_whatever_fails_thresholds_stay_in_bounds_and_come_back(group: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "mars_ray")  # a million lines of silent replicas
    each = SCHEDULES // GROUPS
    for seed in range(group * each, (group + 1) * each):
        try:
            World(seed).run()
        except Exception as error:
            raise AssertionError(f"with seed {seed}: {error!r}") from error
