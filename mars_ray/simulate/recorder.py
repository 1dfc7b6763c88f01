"""Record requests, latencies, tokens and their quality in a simulation, second by second."""

import numpy as np
from numpy.typing import NDArray

from mars_ray.load.slo import RequestSlo
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.metrics import LatencyHistogram, SecondMetrics, SimulationMetrics, percentiles

Array = NDArray[np.float64]


class SimulationRecorder:
    """Recorder of the figures of one simulation."""

    def __init__(self, machine: Machine, slo: RequestSlo | None, front_s: float) -> None:
        self._machine = machine
        self._slo = slo
        self._front_s = front_s
        self._whole = {name: LatencyHistogram() for name in ("ttft", "tpot", "e2e")}
        self._now = {name: LatencyHistogram() for name in ("ttft", "tpot", "e2e")}
        self._sums = np.zeros(4)
        """Sum of the tokens, and their sums weighted by threshold, by agreement and by accuracy."""
        self._ended: list[Array] = []
        self._curve: dict[float, tuple[float, float, float]] = {}
        self._tokens_before: Array = np.zeros(0)
        self._counts = dict.fromkeys(("arrived", "refused", "ended", "good"), 0)
        self._totals = dict.fromkeys(("arrived", "refused", "ended", "good", "too_long"), 0)
        self.last_end_s = 0.0
        self.seconds: list[SecondMetrics] = []

    def arrived(self, arrived: int, refused: int, too_long: int) -> None:
        """Count requests that arrived."""
        self._counts["arrived"] += arrived
        self._counts["refused"] += refused + too_long
        self._totals["too_long"] += too_long

    def ended(self, requests: Array) -> None:
        """Count requests that ended, in the form that `Fleet.advance` returns."""
        self._ended.append(requests)

    def _count_ended(self) -> None:
        arrival, first, end, tokens = np.concatenate([np.zeros((4, 0)), *self._ended], axis=1)
        self._ended = []
        if not len(end):
            return
        ttft = first - arrival + 2 * self._front_s
        e2e = end - arrival + 2 * self._front_s
        several = tokens > 1
        tpot = np.where(several, (end - first) / np.maximum(tokens - 1, 1), 0.0)
        for name, seconds in (("ttft", ttft), ("tpot", tpot[several]), ("e2e", e2e)):
            self._now[name].add(seconds)
            self._whole[name].merge(self._now[name])
        self._counts["ended"] += len(end)
        self.last_end_s = max(self.last_end_s, float(end.max()) + self._front_s)
        if (slo := self._slo) is not None:
            good = np.ones(len(end), bool)
            for seconds, limit_ms in ((ttft, slo.ttft_ms), (tpot, slo.tpot_ms), (e2e, slo.e2e_ms)):
                if limit_ms is not None:
                    good &= seconds <= limit_ms / 1000
            self._counts["good"] += int(good.sum())

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
        self._count_ended()
        before = self._tokens_before if self._tokens_before.size else np.zeros_like(tokens_NC)
        sums = self._quality(tokens_NC - before, thresholds_NC)
        counts = self._counts
        self._tokens_before = tokens_NC.copy()
        self._sums += sums
        means = (sums[1:] / sums[0]).tolist() if sums[0] > 0 else [None] * 3
        finished = counts["ended"] + counts["refused"]
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
                threshold=means[0],
                agreement=means[1],
                accuracy=means[2],
                ttft_p95_ms=_ms(self._now["ttft"].quantile_s(0.95)),
                e2e_p95_ms=_ms(self._now["e2e"].quantile_s(0.95)),
                good=counts["good"] / finished if finished and self._slo else None,
            )
        )
        for name in counts:
            self._totals[name] += counts[name]
        self._counts = dict.fromkeys(counts, 0)
        self._now = {name: LatencyHistogram() for name in self._now}

    def metrics(self, *, in_flight: int, changes_per_minute: float, replica_minutes: float) -> SimulationMetrics:
        """Return the figures of the whole simulation."""
        totals = self._totals
        tokens = float(self._sums[0])
        duration_s = self.last_end_s if not in_flight else float(len(self.seconds))
        means = (self._sums[1:] / tokens).tolist() if tokens else [None] * 3
        finished = totals["ended"] + totals["refused"]
        return SimulationMetrics(
            duration_s=duration_s,
            requests=totals["arrived"],
            ended=totals["ended"],
            refused=totals["refused"] - totals["too_long"],
            too_long=totals["too_long"],
            in_flight=in_flight,
            tokens=tokens,
            tokens_per_s=tokens / duration_s if duration_s else 0.0,
            ttft_ms=percentiles(self._whole["ttft"]),
            tpot_ms=percentiles(self._whole["tpot"]),
            e2e_ms=percentiles(self._whole["e2e"]),
            good=totals["good"] / finished if finished and self._slo else None,
            threshold=means[0],
            agreement=means[1],
            accuracy=means[2],
            threshold_changes_per_minute=changes_per_minute,
            replica_minutes=replica_minutes,
        )

    def _quality(self, tokens_NC: Array, thresholds_NC: Array) -> Array:
        sums = np.zeros(4)
        for value in np.unique(thresholds_NC).tolist():
            if value not in self._curve:
                machine = self._machine
                self._curve[value] = (value, machine.agreement_at(value), machine.accuracy_at(value))
            tokens = float(tokens_NC[thresholds_NC == value].sum())
            sums += tokens * np.array([1.0, *self._curve[value]])
        return sums


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
