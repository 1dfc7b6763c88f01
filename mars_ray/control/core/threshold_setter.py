"""Turn the decisions of a policy into the thresholds that take force: smoothed, within bounds, or set by an operator.

In:    decisions of a policy; bounds; overrides.
Out:   the decision that takes force, for the whole cluster or for one replica.
Never: jumps when a controller begins: it starts from the thresholds in force.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from mars_ray.control.core.overrides import Overrides
from mars_ray.control.core.replica_registry import ReplicaRegistry
from mars_ray.control.policies.bounds import Bounds
from mars_ray.control.policies.policy import Decision


class Smoother:
    """Smooths one threshold: down to the higher of the last two decisions, up to the lowest of `recover_s` seconds.

    So it needs no dead band beside the steps of the grid, and cannot wind up.
    """

    def __init__(self, in_force: float, now_s: float, recover_s: float) -> None:
        self._recover_s = recover_s
        self._last_aim = in_force
        self._allowed: deque[tuple[float, float]] = deque([(now_s, in_force)])
        """What each second allowed, rising: a value that is followed by a lower one can never be the least again."""

    def follow(self, decision: float, now_s: float) -> float:
        """Return the threshold for `decision`."""
        allowed, self._last_aim = max(decision, self._last_aim), decision
        while self._allowed and self._allowed[-1][1] >= allowed:
            self._allowed.pop()
        self._allowed.append((now_s, allowed))
        while now_s - self._allowed[0][0] > self._recover_s:
            self._allowed.popleft()
        return self._allowed[0][1]


class ThresholdSetter:
    """Holds a smoother for each class of the cluster, and of each replica that has thresholds of its own."""

    def __init__(self, recover_s: float, overrides: Overrides, replicas: ReplicaRegistry) -> None:
        self._recover_s, self._overrides, self._replicas = recover_s, overrides, replicas
        self._smoothers: dict[tuple[str | None, str], Smoother] = {}
        """Smoothers by replica and class; those of the whole cluster are under None."""

    def apply(
        self, replica: str | None, decisions: Mapping[str, Decision], bounds: Mapping[str, Bounds], now_s: float
    ) -> dict[str, Decision]:
        """Return the decisions as they take force, for one replica or, with None, for the cluster."""
        return {name: self._apply(replica, name, decisions[name], bounds[name], now_s) for name in bounds}

    def has(self, replica: str) -> bool:
        """Return whether a replica has had thresholds of its own."""
        return any(each == replica for each, _ in self._smoothers)

    def forget(self, replica: str) -> None:
        """Drop what is kept for a replica that is gone."""
        self._smoothers = {key: each for key, each in self._smoothers.items() if key[0] != replica}

    def _apply(self, replica: str | None, name: str, decision: Decision, bounds: Bounds, now_s: float) -> Decision:
        smoother = self._smoothers.get((replica, name))
        if smoother is None:
            # Begin where the replicas are: a new controller must not jump.
            start = min(self._replicas.thresholds(replica, name), default=bounds.ceiling)
            smoother = self._smoothers[replica, name] = Smoother(start, now_s, self._recover_s)
        override = self._overrides.in_force(name)
        # Under an override too: when it ends, this is what holds.
        threshold = smoother.follow(decision.threshold, now_s)
        if override:
            return replace(decision, threshold=override.threshold, reason="set by an operator")
        rising = threshold != decision.threshold
        reason = f"{decision.reason}; it rises once that lasts" if rising else decision.reason
        if threshold < bounds.floor:
            reason = "the floor"
        return replace(decision, threshold=min(max(threshold, bounds.floor), bounds.ceiling), reason=reason)
