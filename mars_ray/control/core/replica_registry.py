"""The replicas that report to the controller, and sums over their reports.

In:    reports in any order, and the time at which each arrives.
Out:   the load on all replicas together or on each alone; the thresholds in force.
Never: keeps a replica that has been silent for longer than a lease.
"""

from collections.abc import Callable, Iterator, Sequence

from mars_ray.control.cluster_load import ClusterLoad, sum_by_class
from mars_ray.control.core.status import ReplicaStatus
from mars_ray.control.demand import DemandMeter
from mars_ray.control.replica_messages import ReplicaReport
from mars_ray.control.replica_speed import speed_of
from mars_ray.engine.stats.profile import ProfilePoint


class ReplicaRegistry:
    """The replicas that have reported in the last `silent_s` seconds."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._meters: dict[str, DemandMeter] = {}
        self._seen_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._meters)

    def observe(self, report: ReplicaReport, now_s: float) -> None:
        """Take a report. It has no effect unless it is newer than all earlier reports of its replica."""
        meter = self._meters.get(report.replica)
        if meter is None:
            self._meters[report.replica] = DemandMeter(report)
            self._seen_s[report.replica] = now_s
        elif meter.observe(report):
            self._seen_s[report.replica] = now_s

    def forget_silent(self, now_s: float) -> list[str]:
        """Forget the replicas that no longer report, and return their names."""
        silent = [replica for replica, seen_s in self._seen_s.items() if now_s - seen_s > self._silent_s]
        for replica in silent:
            del self._seen_s[replica], self._meters[replica]
        return silent

    def load(self, latency: Callable[[Sequence[float]], float] = max) -> ClusterLoad:
        """Return the load on all replicas together. Its p95 is the worst replica's, unless `latency` combines them
        differently."""
        return _load(list(self._meters.values()), latency)

    def loads(self) -> Iterator[tuple[str, ClusterLoad]]:
        """Yield the name of each replica, together with the load on that replica alone."""
        return ((replica, _load([meter])) for replica, meter in self._meters.items())

    def profiles(self) -> list[tuple[ProfilePoint, ...]]:
        """Return the profile of each replica."""
        return [meter.last.state.profile for meter in self._meters.values()]

    def thresholds(self, replica: str | None = None, name: str | None = None) -> list[float]:
        """Return the thresholds in force for one replica and one class; None stands for all replicas or all classes."""
        return [
            class_state.threshold
            for meter in self._meters.values()
            for class_state in meter.last.state.classes
            if replica in (None, meter.last.replica) and name in (None, class_state.name)
        ]

    def tokens_s(self) -> float | None:
        """Return the tokens per second of all replicas together; None until the rate of each replica is known."""
        rates = [meter.tokens_s() for meter in self._meters.values()]
        known_rates = [rate for rate in rates if rate is not None]
        return sum(known_rates) if len(known_rates) == len(rates) else None

    def requests_s(self) -> dict[str, float]:
        """Return the number of requests that arrive per second, by class."""
        demands = sum_by_class([demand for meter in self._meters.values() for demand in meter.demand()])
        return {demand.name: demand.requests_s for demand in demands}

    def status(self, now_s: float) -> tuple[ReplicaStatus, ...]:
        """Return the status of each replica, for operators."""
        return tuple(
            ReplicaStatus(replica=replica, age_s=now_s - self._seen_s[replica], state=meter.last.state)
            for replica, meter in self._meters.items()
        )


def _load(meters: list[DemandMeter], latency: Callable[[Sequence[float]], float] = max) -> ClusterLoad:
    states = [meter.last.state for meter in meters]
    ttfts_s = [state.ttft_p95_s for state in states if state.ttft_p95_s is not None]
    tpots_s = [state.tpot_p95_s for state in states if state.tpot_p95_s is not None]
    prices = [meter.last.price_per_hour for meter in meters if meter.last.price_per_hour is not None]
    return ClusterLoad(
        replicas=len(meters),
        classes=sum_by_class([demand for meter in meters for demand in meter.demand()]),
        speed=speed_of(states),
        rows=sum(state.max_num_seqs for state in states),
        ttft_p95_s=latency(ttfts_s) if ttfts_s else None,
        tpot_p95_s=latency(tpots_s) if tpots_s else None,
        price_per_hour=sum(prices) if meters and len(prices) == len(meters) else None,
    )
