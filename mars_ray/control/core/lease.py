"""The replica's side of control: heartbeats report the state of its engine, and its lease follows the directives.

In:    an engine, a function that sends reports, directives in any order, a clock.
Out:   numbered reports; thresholds set in the engine, once a second.
Never: follows a directive whose lease has ended, or one that is out of bounds, for another replica, older than the last
       one, or from a controller that has been replaced; delays a heartbeat because a controller has not answered, or
       stops because a controller fails.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.controller import Controller, SteadyClock
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.stats.state import EngineState
from mars_ray.errors import ReportError

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds from one heartbeat to the next."""
REPORTS_KEPT = 64
"""Number of reports whose times are kept. Answers to older reports are ignored."""

Send = Callable[[ReplicaReport], Awaitable[Directive]]


class Lease:
    """The lease of one replica: the directive that it follows, and the time until which it does so."""

    def __init__(
        self,
        replica: str,
        plan: ControlPlan,
        clock: Callable[[], float] = time.monotonic,
        *,
        price_per_hour: float | None = None,
    ) -> None:
        self._replica = replica
        self._price_per_hour = price_per_hour
        self._plan = plan
        self.length_s = plan.settings.lease_s
        """Seconds for which a directive is followed, counted from the report that it answers."""
        self._now_s = SteadyClock(clock)
        self._made_s: OrderedDict[int, float] = OrderedDict()
        """Time at which each report was made, by its number."""
        self._number = 0
        self._directive: Directive | None = None
        self._ends_s = 0.0
        self._replaced = set[str]()
        """Controllers that have been replaced. A controller that was cut off may not know that it has been replaced.

        A late answer can make the newest controller look replaced, so none counts as such once the lease has ended.
        """
        self._alone: Controller | None = None
        """Controller that decides from this replica's own reports while no directive is in force."""

    def report(self, state: EngineState) -> ReplicaReport:
        """Return the report for the next heartbeat."""
        self._number += 1
        now_s = self._now_s()
        self._made_s[self._number] = now_s
        if len(self._made_s) > REPORTS_KEPT:
            self._made_s.popitem(last=False)
        return ReplicaReport(
            replica=self._replica,
            number=self._number,
            seconds=now_s,
            state=state,
            price_per_hour=self._price_per_hour,
        )

    def take(self, directive: Directive) -> bool:
        """Follow a directive from now on and return True. If the directive is invalid, ignore it and return False."""
        made_s = self._made_s.get(directive.answers)
        if directive.replica != self._replica or made_s is None:
            return False
        if self._directive is not None and directive.answers <= self._directive.answers:
            return False
        if self._now_s() >= made_s + directive.lease_s:
            return False
        if self.directive is None:
            self._replaced.clear()
        if directive.controller in self._replaced:
            log.error("ignoring a directive of controller %s, which has been replaced", directive.controller)
            return False
        for name, threshold in directive.thresholds.items():
            if name not in self._names() or not self._plan.floor(name) <= threshold <= self._plan.ceiling:
                log.error("ignoring a directive: threshold %s of class %s is out of bounds", threshold, name)
                return False
        if set(directive.thresholds) != self._names():
            log.error("ignoring a directive: it lacks classes, and has only %s", ", ".join(directive.thresholds))
            return False
        if self._directive is not None and directive.controller != self._directive.controller:
            self._replaced.add(self._directive.controller)
            log.warning("replica %s now follows controller %s", self._replica, directive.controller)
        self._directive = directive
        self._ends_s = made_s + directive.lease_s
        return True

    @property
    def directive(self) -> Directive | None:
        """The directive in force; None once its lease has ended."""
        return self._directive if self._directive is not None and self._now_s() < self._ends_s else None

    def in_force(self, report: ReplicaReport) -> Directive:
        """Return the directive in force, or the replica's own decision from `report` if there is none."""
        if directive := self.directive:
            self._alone = None
            return directive
        if self._alone is None:
            log.warning("no controller answers: replica %s decides alone", self._replica)
            self._alone = Controller(self._plan, clock=self._now_s)
        return self._alone.handle_report(report)

    def _names(self) -> set[str]:
        return {service_class.name for service_class in self._plan.classes}


class ControlledEngine(Protocol):
    """Interface of an engine to its heartbeats. Both methods raise an error if the engine is gone."""

    async def state(self) -> EngineState:
        """Return the state of the engine."""

    def set_thresholds(self, by_class: Mapping[str, float], /) -> None:
        """Set the thresholds of classes from the next step on."""


async def run_heartbeats(engine: ControlledEngine, lease: Lease, send: Send, every_s: float = EVERY_S) -> None:
    """Send heartbeats until cancelled. Raises the engine's error when the engine is gone."""
    awaited = set[asyncio.Task[None]]()
    """Tasks of reports that have no answer yet. A busy controller may always answer after the next heartbeat."""
    try:
        while True:
            next_s = asyncio.get_running_loop().time() + every_s
            await send_heartbeat(engine, lease, send, every_s, awaited)
            await asyncio.sleep(next_s - asyncio.get_running_loop().time())
    finally:
        for task in awaited:
            task.cancel()


async def send_heartbeat(
    engine: ControlledEngine, lease: Lease, send: Send, within_s: float, awaited: set[asyncio.Task[None]]
) -> None:
    """Report once, wait up to `within_s` seconds for the answer, and set the engine to the thresholds then in force.

    A later answer is taken when it comes; until then its task is in `awaited`. Raises the engine's error when the
    engine is gone.
    """
    state = await engine.state()
    try:
        report = lease.report(state)
    except ReportError as error:  # the next report may be valid
        log.error("skipping a heartbeat: %s", error)
        return
    task = asyncio.create_task(_ask(lease, send, report))
    awaited.add(task)
    task.add_done_callback(awaited.discard)
    await asyncio.wait([task], timeout=within_s)
    thresholds = lease.in_force(report).thresholds
    if thresholds != {class_state.name: class_state.threshold for class_state in state.classes}:
        engine.set_thresholds(thresholds)


async def _ask(lease: Lease, send: Send, report: ReplicaReport) -> None:
    try:
        async with asyncio.timeout(lease.length_s):
            lease.take(await send(report))
    except Exception as error:  # whatever the failure, the lease decides which thresholds are in force
        log.debug("received no directive: %r", error)
