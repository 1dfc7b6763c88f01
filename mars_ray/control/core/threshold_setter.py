"""Turn the decisions of a policy into the thresholds in force: smoothed, within bounds, or set by an operator.

In:    decisions of a policy; bounds; overrides.
Out:   the decision in force, for the whole cluster or for one replica.
Never: lets thresholds jump when a controller starts, because smoothing begins at the thresholds already in force.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from mars_ray.control.core.overrides import Overrides
from mars_ray.control.core.replica_registry import ReplicaRegistry
from mars_ray.control.policies.policy import Bounds, Decision


class Smoother:
    """Smooths one threshold, which falls to the higher of the last two decisions and rises to the lowest allowed value.

    A value is allowed if it was the higher of two successive decisions in the last `recover_s` seconds. This rule needs
    no dead band other than the steps of the grid, and it has no integral that could wind up.
    """

    def __init__(self, in_force: float, now_s: float, recover_s: float) -> None:
        self._recover_s = recover_s
        self._last_aim = in_force
        self._allowed: deque[tuple[float, float]] = deque([(now_s, in_force)])
        """Pairs of time and allowed value, both rising. A value is dropped when a lower one follows, because it no
        longer has an effect."""

    def follow(self, decision: float, now_s: float) -> float:
        """Take the policy's next decision, and return the smoothed threshold."""
        allowed = max(decision, self._last_aim)
        self._last_aim = decision
        while self._allowed and self._allowed[-1][1] >= allowed:
            self._allowed.pop()
        self._allowed.append((now_s, allowed))
        while now_s - self._allowed[0][0] > self._recover_s:
            self._allowed.popleft()
        return self._allowed[0][1]


class ThresholdSetter:
    """Sets the thresholds of the cluster, and of each replica that has thresholds of its own."""

    def __init__(self, recover_s: float, overrides: Overrides, replicas: ReplicaRegistry) -> None:
        self._recover_s = recover_s
        self._overrides = overrides
        self._replicas = replicas
        self._smoothers: dict[tuple[str | None, str], Smoother] = {}
        """Smoothers by replica and class; the replica None stands for the whole cluster."""

    def apply(
        self, replica: str | None, decisions: Mapping[str, Decision], bounds: Mapping[str, Bounds], now_s: float
    ) -> dict[str, Decision]:
        """Return the decisions in force for one replica, or for the whole cluster if `replica` is None."""
        return {name: self._apply(replica, name, decisions[name], bounds[name], now_s) for name in bounds}

    def has(self, replica: str) -> bool:
        """Return whether a replica has had thresholds of its own."""
        return any(owner == replica for owner, _ in self._smoothers)

    def forget(self, replica: str) -> None:
        """Drop the smoothers of a replica that is gone."""
        self._smoothers = {key: smoother for key, smoother in self._smoothers.items() if key[0] != replica}

    def _apply(self, replica: str | None, name: str, decision: Decision, bounds: Bounds, now_s: float) -> Decision:
        smoother = self._smoothers.get((replica, name))
        if smoother is None:
            # Begin at the thresholds in force, because a new controller must not jump.
            start = min(self._replicas.thresholds(replica, name), default=bounds.ceiling)
            smoother = self._smoothers[replica, name] = Smoother(start, now_s, self._recover_s)
        override = self._overrides.in_force(name)
        # Follow the policy during an override too, because the policy's threshold takes effect when the override ends.
        threshold = smoother.follow(decision.threshold, now_s)
        if override:
            return replace(decision, threshold=override.threshold, reason="set by an operator")
        rising = threshold != decision.threshold
        reason = f"{decision.reason}; the threshold will rise if this lasts" if rising else decision.reason
        if threshold < bounds.floor:
            reason = "kept at the floor"
        return replace(decision, threshold=min(max(threshold, bounds.floor), bounds.ceiling), reason=reason)
