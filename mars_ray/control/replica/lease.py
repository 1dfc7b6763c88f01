"""The lease of a replica: send reports, follow directives, and decide alone without one.

In:    states of the engine, directives in any order, a clock.
Out:   numbered reports; the thresholds in force.
Never: follows a directive beyond its lease, an old one after a newer, one of a controller after another took its place,
       or one that is not its own or out of bounds.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.controller import Controller
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.control.steady_clock import SteadyClock
from mars_ray.engine.stats.state import EngineState

log = logging.getLogger(__name__)

REPORTS_KEPT = 64
"""Reports whose times are kept; answers to older ones are of no use."""


class Lease:
    """The lease of one replica: which directive it follows, and until when."""

    def __init__(self, replica: str, plan: ControlPlan, clock: Callable[[], float] = time.monotonic) -> None:
        self._replica, self._plan, self._now_s = replica, plan, SteadyClock(clock)
        self._made_s: OrderedDict[int, float] = OrderedDict()
        """When each report was made."""
        self._number = 0
        self._directive: Directive | None = None
        self._ends_s = 0.0
        self._replaced = set[str]()
        """Controllers that another took the place of: one that was cut off may not know that it was given up."""
        self._alone: Controller | None = None
        """Decides for this replica by its own reports while there is no lease."""

    def report(self, state: EngineState) -> ReplicaReport:
        """Return the next heartbeat."""
        self._number += 1
        now_s = self._now_s()
        self._made_s[self._number] = now_s
        if len(self._made_s) > REPORTS_KEPT:
            self._made_s.popitem(last=False)
        return ReplicaReport(replica=self._replica, number=self._number, seconds=now_s, state=state)

    def take(self, directive: Directive) -> bool:
        """Follow a directive from now on; return False, without effect, for an invalid one."""
        made_s = self._made_s.get(directive.answers)
        if directive.replica != self._replica or made_s is None:
            return False
        if self._directive is not None and directive.answers <= self._directive.answers:
            return False
        if self._now_s() >= made_s + directive.lease_s:
            return False
        if directive.controller in self._replaced:
            log.error("controller %s was replaced; what it says is ignored", directive.controller)
            return False
        for name, threshold in directive.thresholds.items():
            if name not in self._names() or not self._plan.floor(name) <= threshold <= self._plan.ceiling:
                log.error("a directive wants %s for class %s, which is out of bounds; it is ignored", threshold, name)
                return False
        if set(directive.thresholds) != self._names():
            log.error("a directive names the classes %s; it is ignored", ", ".join(directive.thresholds))
            return False
        if self._directive is not None and directive.controller != self._directive.controller:
            self._replaced.add(self._directive.controller)
            log.warning("replica %s follows another controller: %s", self._replica, directive.controller)
        self._directive, self._ends_s = directive, made_s + directive.lease_s
        return True

    @property
    def directive(self) -> Directive | None:
        """The directive that holds; None once its lease ended."""
        return self._directive if self._directive is not None and self._now_s() < self._ends_s else None

    def in_force(self, report: ReplicaReport) -> Directive:
        """Return the directive in force, or the replica's own decision from its newest report."""
        if held := self.directive:
            self._alone = None
            return held
        if self._alone is None:
            log.warning("no controller answers: replica %s decides alone", self._replica)
            self._alone = Controller(self._plan, clock=self._now_s)
        return self._alone.handle_report(report)

    def _names(self) -> set[str]:
        return {each.name for each in self._plan.classes}
