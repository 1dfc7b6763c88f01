"""Changes of thresholds by the policy, for the audit log: at a bounded rate, with the load that caused them.

In:    every change of the threshold of a class.
Out:   up to one event for each class in `EVERY_S`, which covers all changes since the event before.
Never: drops a change: each is part of one event, at the latest `EVERY_S` later if decisions go on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """One change of a threshold, or several one after another."""

    service_class: str
    before: float
    after: float
    lowest: float
    """Lowest threshold between the first and the last change."""
    changes: int
    reason: str
    """Reason for the lowest threshold."""
    load: float | None
    """Highest demand as a share of the capacity of all replicas at full quality; None if it is not known."""

    @property
    def cause(self) -> str:
        """Reason and load in words."""
        load = "" if self.load is None else f"; demand is {self.load:.0%} of the capacity at full quality"
        return f"{self.reason}{load}"

    def then(self, later: "PolicyChange") -> "PolicyChange":
        """Return this change and a later one as one."""
        lowest = min(self, later, key=lambda change: change.lowest)
        loads = [change.load for change in (self, later) if change.load is not None]
        return replace(
            lowest,
            before=self.before,
            after=later.after,
            changes=self.changes + later.changes,
            load=max(loads, default=None),
        )


class PolicyChanges:
    """Joins the changes of each class into events. Not thread-safe."""

    def __init__(self, observe: Callable[[PolicyChange], None]) -> None:
        self._observe = observe
        self._waiting: dict[str, PolicyChange] = {}
        self._event_s: dict[str, float] = {}
        """Time of the last event of each class."""

    def add(self, change: PolicyChange) -> None:
        """Add a change, which the next call of `report` may report."""
        earlier = self._waiting.get(change.service_class)
        self._waiting[change.service_class] = earlier.then(change) if earlier else change

    def report(self, now_s: float) -> None:
        """Report the changes of the classes whose last event is old enough."""
        for name in list(self._waiting):
            last_s = self._event_s.get(name)
            if last_s is None or now_s - last_s >= EVERY_S:
                self._event_s[name] = now_s
                self._observe(self._waiting.pop(name))
