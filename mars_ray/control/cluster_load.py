"""The load on one replica or on a cluster, for policies.

In:    demand and speed.
Out:   the share of its time that demand would take, at any thresholds, within a promised time per token.
Never: decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from mars_ray.control.demand import ClassDemand
from mars_ray.control.replica_speed import ReplicaSpeed
from mars_ray.errors import ReportError


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Remaining work of a batch job, as its driver reports it. Raises `ReportError` for invalid values."""

    tokens: float
    """Tokens still to be generated, as far as is known; rows that run count in full, which leaves time for the last."""
    seconds: float | None
    """Seconds left until the deadline, below 0 once it passed; None where there is none."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tokens) and self.tokens >= 0):
            raise ReportError(f"backlog.tokens is {self.tokens}; it must be a finite number, at least 0.")
        if self.seconds is not None and not math.isfinite(self.seconds):
            raise ReportError(f"backlog.seconds is {self.seconds}; it must be a finite number, or None.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJobState:
    """A batch job at the moment thresholds are decided."""

    backlog: Backlog
    threshold: float
    """The threshold in force, the mean of all workers."""
    tokens_s: float | None
    """Tokens that all workers generate each second; None before that was measured."""


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
    tpot_p95_s: float | None
    job: BatchJobState | None = None
    """The batch job they work on; None where callers make the load, and before the driver told of the job."""

    def arriving_share(self, name: str, threshold: float) -> float:
        """Return the share of one replica's time that the arrivals of a class take, 1.0 for all of it."""
        demand = self._class(name)
        return demand.requests_s * self.request_seconds(name, threshold)

    def share_with_queue(self, name: str, threshold: float, tpot_s: float | None = None) -> float:
        """Return the share of one replica's time that a class takes while its queue is worked off."""
        demand = self._class(name)
        return (demand.requests_s + demand.waiting / DRAIN_S) * self.request_seconds(name, threshold, tpot_s)

    def request_seconds(self, name: str, threshold: float, tpot_s: float | None = None) -> float:
        """Return the seconds of a busy replica that one request of a class takes.

        As many sequences run as there are rows, or no more than get a token each in `tpot_s`, prompts read beside them.
        """
        assert self.speed is not None
        demand = self._class(name)
        reading_s = self.speed.prompt_seconds(demand.prompt_tokens)
        if tpot_s is None:
            return reading_s + demand.output_tokens / self.speed.max_tokens_s(threshold)
        seconds_R = reading_s + demand.output_tokens / self.speed.rates(threshold)
        tpot_s_R = np.arange(1, len(seconds_R) + 1) * seconds_R / demand.output_tokens
        return float(seconds_R[max(0, int(np.count_nonzero(tpot_s_R <= tpot_s)) - 1)])

    def _class(self, name: str) -> ClassDemand:
        return next(each for each in self.classes if each.name == name)


def sum_by_class(demands: Sequence[ClassDemand]) -> tuple[ClassDemand, ...]:
    """Return the sum of the demand of several replicas, by class."""

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
