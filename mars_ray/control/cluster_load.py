"""The load on one replica or on a cluster, as policies see it.

In:    demand and speed.
Out:   the share of its time that demand would take, at any thresholds; time per token.
Never: decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from mars_ray.control.backlog import BatchJobState
from mars_ray.control.demand import ClassDemand
from mars_ray.control.replica_speed import ReplicaSpeed

DRAIN_S = 2.0
"""Seconds in which a queue should be worked off: it is demand too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """The load on one replica, or on several together."""

    replicas: int
    classes: tuple[ClassDemand, ...]
    speed: ReplicaSpeed | None
    """The speed of a typical replica; None before it is known."""
    rows: int
    """Rows of all replicas together."""
    ttft_p95_s: float | None
    itl_p95_s: float | None
    job: BatchJobState | None = None
    """The batch job they work on; None where callers make the load, and before the driver told of the job."""

    def arriving_share(self, name: str, threshold: float) -> float:
        """Return the share of one replica's time that the arrivals of a class take, 1.0 for all of it."""
        demand = self._class(name)
        return demand.requests_s * self.request_seconds(name, threshold)

    def share_with_queue(self, name: str, threshold: float) -> float:
        """Return the share of one replica's time that a class takes while its queue is worked off."""
        demand = self._class(name)
        return (demand.requests_s + demand.waiting / DRAIN_S) * self.request_seconds(name, threshold)

    def token_seconds(self, thresholds: Mapping[str, float]) -> float:
        """Return the time per token each sequence sees, once as many run as demand needs. Infinite past capacity."""
        assert self.speed is not None
        tokens_s = reading = 0.0
        for demand in self.classes:
            tokens_s += demand.requests_s * demand.output_tokens / self.replicas
            reading += demand.requests_s * self.speed.prompt_seconds(demand.prompt_tokens) / self.replicas
        if not tokens_s:
            return 0.0
        # Time per token of a mix of classes is the mean of theirs.
        token_s_R = np.zeros(self.speed.rows)
        for demand in self.classes:
            part = demand.requests_s * demand.output_tokens / self.replicas / tokens_s
            token_s_R += part / self.speed.rates(thresholds[demand.name])
        rates_R = (1 - min(reading, 1.0)) / token_s_R
        enough = np.flatnonzero(rates_R >= tokens_s)
        return float((enough[0] + 1) / rates_R[enough[0]]) if len(enough) else float("inf")

    def request_seconds(self, name: str, threshold: float) -> float:
        """Return what one request of a class takes of a replica whose rows are all in use."""
        assert self.speed is not None
        demand = self._class(name)
        reading_s = self.speed.prompt_seconds(demand.prompt_tokens)
        return reading_s + demand.output_tokens / self.speed.max_tokens_s(threshold)

    def _class(self, name: str) -> ClassDemand:
        return next(each for each in self.classes if each.name == name)


def sum_by_class(demands: Sequence[ClassDemand]) -> tuple[ClassDemand, ...]:
    """Return the demand of several replicas as one, by class."""

    def name(demand: ClassDemand) -> str:
        return demand.name

    return tuple(_sum(list(same)) for _, same in groupby(sorted(demands, key=name), key=name))


def _sum(demands: Sequence[ClassDemand]) -> ClassDemand:
    if len(demands) == 1:
        return demands[0]
    requests_s = sum(each.requests_s for each in demands)
    weights = [each.requests_s / requests_s if requests_s else 1 / len(demands) for each in demands]
    return ClassDemand(
        name=demands[0].name,
        requests_s=requests_s,
        prompt_tokens=sum(w * each.prompt_tokens for w, each in zip(weights, demands, strict=True)),
        output_tokens=sum(w * each.output_tokens for w, each in zip(weights, demands, strict=True)),
        running=sum(each.running for each in demands),
        waiting=sum(each.waiting for each in demands),
    )
