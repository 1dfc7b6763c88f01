"""Record requests, latencies, tokens and their quality in a simulation, by second and for the whole."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_ray.load.record import RequestSlo
from mars_ray.simulate.machine import Machine

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPercentiles:
    """Latencies in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def percentiles(latencies_ms: Array) -> LatencyPercentiles | None:
    """Return the mean and the percentiles, without NaN; None if nothing was measured."""
    measured = latencies_ms[np.isfinite(latencies_ms)]
    if not len(measured):
        return None
    p50, p90, p95, p99 = np.percentile(measured, [50, 90, 95, 99]).tolist()
    return LatencyPercentiles(mean=float(measured.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMetrics:
    """Figures of one second of the cluster."""

    second: int
    arrived: int
    refused: int
    ended: int
    tokens: float
    running: int
    waiting: int
    replicas: int
    """Replicas that take requests."""
    desired_replicas: int
    threshold: float | None
    """Mean over the generated tokens, like `agreement` and `accuracy`."""
    agreement: float | None
    accuracy: float | None
    ttft_p95_ms: float | None
    e2e_p95_ms: float | None
    good: float | None
    """Share of requests within the SLO, among all that ended or were refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationMetrics:
    """Figures of a whole simulation."""

    duration_s: float
    """Seconds from the start to the end of the last request."""
    requests: int
    ended: int
    refused: int
    """Requests refused because the queue was full."""
    too_long: int
    """Requests refused because prompt and answer exceed the model's context."""
    in_flight: int
    """Requests still in flight at the end of the simulation."""
    tokens: float
    tokens_per_s: float
    ttft_ms: LatencyPercentiles | None
    tpot_ms: LatencyPercentiles | None
    e2e_ms: LatencyPercentiles | None
    good: float | None
    """Share of all requests that met the SLO."""
    threshold: float | None
    """Mean over the generated tokens, like `agreement` and `accuracy`."""
    agreement: float | None
    accuracy: float | None
    threshold_changes_per_minute: float
    """Mean over classes and replicas."""
    replica_minutes: float


def columns(seconds: Sequence[SecondMetrics]) -> dict[str, list[float | None]]:
    """Return one series per field, with one value per second."""
    return {name: [getattr(second, name) for second in seconds] for name in SecondMetrics.__dataclass_fields__}


class SimulationRecorder:
    """Recorder of the figures of one simulation."""

    def __init__(self, machine: Machine, slo: RequestSlo | None, front_s: float) -> None:
        self._machine = machine
        self._slo = slo
        self._front_s = front_s
        self._ended: list[Array] = [np.zeros((4, 0))]
        """Requests that ended in the current second, in the form that `Fleet.advance` returns."""
        self._latencies_ms: list[Array] = [np.zeros((3, 0))]
        """TTFT, TPOT and E2E of the requests of each second, as arrays [3, S]; TPOT is NaN for answers of one token."""
        self._sums = np.zeros(4)
        """Sum of the tokens, and their sums weighted by threshold, by agreement and by accuracy."""
        self._curve: dict[float, tuple[float, float, float]] = {}
        self._tokens_before: Array | float = 0.0
        self._counts = Counter[str]()
        self._totals = Counter[str]()
        self.last_end_s = 0.0
        self.seconds: list[SecondMetrics] = []

    def arrived(self, arrived: int, refused: int, too_long: int) -> None:
        """Count requests that arrived."""
        self._counts.update(arrived=arrived, refused=refused + too_long, too_long=too_long)

    def ended(self, requests: Array) -> None:
        """Count requests that ended, in the form that `Fleet.advance` returns."""
        self._ended.append(requests)

    def second(
        self,
        number: int,
        tokens_NC: Array,
        thresholds_NC: Array,
        *,
        running: int,
        waiting: int,
        replicas: int,
        desired: int,
    ) -> None:
        """Close a second in which `thresholds_NC` were in force; `tokens_NC` are totals since the start."""
        ttft_ms, _, e2e_ms = self._count_ended()
        sums = self._quality(tokens_NC - self._tokens_before, thresholds_NC)
        self._tokens_before = tokens_NC.copy()
        self._sums += sums
        counts = self._counts
        threshold, agreement, accuracy = _means(sums)
        self.seconds.append(
            SecondMetrics(
                second=number,
                arrived=counts["arrived"],
                refused=counts["refused"],
                ended=counts["ended"],
                tokens=float(sums[0]),
                running=running,
                waiting=waiting,
                replicas=replicas,
                desired_replicas=desired,
                threshold=threshold,
                agreement=agreement,
                accuracy=accuracy,
                ttft_p95_ms=_p95(ttft_ms),
                e2e_p95_ms=_p95(e2e_ms),
                good=self._good(counts),
            )
        )
        self._totals.update(counts)
        self._counts = Counter()

    def metrics(self, *, in_flight: int, changes_per_minute: float, replica_minutes: float) -> SimulationMetrics:
        """Return the figures of the whole simulation."""
        totals = self._totals
        tokens = float(self._sums[0])
        duration_s = self.last_end_s if not in_flight else float(len(self.seconds))
        ttft_ms, tpot_ms, e2e_ms = map(percentiles, np.concatenate(self._latencies_ms, axis=1))
        threshold, agreement, accuracy = _means(self._sums)
        return SimulationMetrics(
            duration_s=duration_s,
            requests=totals["arrived"],
            ended=totals["ended"],
            refused=totals["refused"] - totals["too_long"],
            too_long=totals["too_long"],
            in_flight=in_flight,
            tokens=tokens,
            tokens_per_s=tokens / duration_s if duration_s else 0.0,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            e2e_ms=e2e_ms,
            good=self._good(totals),
            threshold=threshold,
            agreement=agreement,
            accuracy=accuracy,
            threshold_changes_per_minute=changes_per_minute,
            replica_minutes=replica_minutes,
        )

    def _count_ended(self) -> Array:
        """Count the requests that ended in this second, and return their latencies as an array [3, S]."""
        arrival, first, end, tokens = np.concatenate(self._ended, axis=1)
        self._ended = [np.zeros((4, 0))]
        tpot = np.where(tokens > 1, (end - first) / np.maximum(tokens - 1, 1), np.nan)
        latencies_ms: Array = 1000 * np.array(
            [first - arrival + 2 * self._front_s, tpot, end - arrival + 2 * self._front_s]
        )
        self._latencies_ms.append(latencies_ms)
        self._counts["ended"] += len(end)
        self.last_end_s = max(self.last_end_s, float(end.max(initial=0.0)) + self._front_s)
        if (slo := self._slo) is not None:
            limits_ms = [limit or np.inf for limit in (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms)]
            missed = latencies_ms > np.array(limits_ms)[:, None]
            self._counts["good"] += int((~missed.any(axis=0)).sum())
        return latencies_ms

    def _good(self, counts: Counter[str]) -> float | None:
        """Return the share of requests within the SLO, among all that ended or were refused."""
        finished = counts["ended"] + counts["refused"]
        return counts["good"] / finished if finished and self._slo else None

    def _quality(self, tokens_NC: Array, thresholds_NC: Array) -> Array:
        sums = np.zeros(4)
        for value in np.unique(thresholds_NC).tolist():
            if value not in self._curve:
                machine = self._machine
                self._curve[value] = (value, machine.agreement_at(value), machine.accuracy_at(value))
            tokens = float(tokens_NC[thresholds_NC == value].sum())
            sums += tokens * np.array([1.0, *self._curve[value]])
        return sums


def _p95(values: Array) -> float | None:
    return float(np.percentile(values, 95)) if len(values) else None


def _means(sums: Array) -> list[float | None]:
    """Return the mean threshold, agreement and accuracy of tokens; None for each if there are no tokens."""
    return (sums[1:] / sums[0]).tolist() if sums[0] > 0 else [None] * 3
