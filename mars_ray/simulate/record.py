"""What a simulation gave: counts, spreads, a line for each second.

In:    requests that ended, tokens and their thresholds.
Out:   figures and series.
Never: keeps a request: there are millions of them, and spreads are kept in bins of 2 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_ray.bench.load.slo import Slo
from mars_ray.simulate.machine import Machine

Array = NDArray[np.float64]
LEAST_S, MOST_S, PER_FACTOR = 1e-4, 1e5, 50.0
"""Range of a spread, and bins for each factor of e."""
BINS = int(np.log(MOST_S / LEAST_S) * PER_FACTOR) + 2


class Bins:
    """How seconds are spread."""

    def __init__(self) -> None:
        self.counts = np.zeros(BINS)
        self._sum_s = 0.0

    def add(self, seconds: Array) -> None:
        """Count values."""
        place = (np.log(seconds.clip(LEAST_S, MOST_S) / LEAST_S) * PER_FACTOR).astype(np.int64)
        self.counts += np.bincount(place, minlength=BINS)
        self._sum_s += float(seconds.sum())

    def take(self, other: "Bins") -> None:
        """Count what another counted."""
        self.counts += other.counts
        self._sum_s += other._sum_s

    @property
    def mean_s(self) -> float | None:
        """Mean of the values themselves."""
        return self._sum_s / float(self.counts.sum()) if self.counts.any() else None

    def quantile_s(self, share: float) -> float | None:
        """Return the value below which `share` of them are, read within its bin."""
        total = self.counts.sum()
        if not total:
            return None
        below = self.counts.cumsum()
        place = int(np.searchsorted(below, share * total))
        inside = (share * total - below[place] + self.counts[place]) / max(self.counts[place], 1)
        return LEAST_S * float(np.exp((place + inside) / PER_FACTOR))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a request must keep to count as good, in seconds; None where nothing was promised."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def of(cls, slo: Slo) -> "Promise":
        """Return the limits of a load test."""
        limits = {"ttft_s": slo.ttft_ms, "tpot_s": slo.tpot_ms, "e2e_s": slo.e2e_ms}
        return cls(**{name: None if limit is None else limit / 1000 for name, limit in limits.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """One second of the cluster."""

    second: int
    arrived: int
    refused: int
    ended: int
    tokens: float
    running: int
    waiting: int
    replicas: int
    """Those that take requests."""
    desired_replicas: int
    threshold: float | None
    """Mean over the tokens written, as are agreement and accuracy."""
    agreement: float | None
    accuracy: float | None
    ttft_p95_ms: float | None
    e2e_p95_ms: float | None
    good: float | None
    """Share of what ended or was refused that kept what was promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A simulation as a whole."""

    duration_s: float
    """From the beginning to the last end."""
    requests: int
    ended: int
    refused: int
    """Because the queue was full."""
    too_long: int
    """Refused because prompt and answer do not fit the model."""
    in_flight: int
    """When the simulation ended."""
    tokens: float
    tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    good: float | None
    """Share of all requests that kept what was promised."""
    threshold: float | None
    """Mean over the tokens, as are agreement and accuracy."""
    agreement: float | None
    accuracy: float | None
    threshold_changes_per_minute: float
    """Of the mean class on the mean replica."""
    replica_minutes: float


class Record:
    """Of one simulation."""

    def __init__(self, machine: Machine, promise: Promise | None, front_s: float) -> None:
        self._machine, self._promise, self._front_s = machine, promise, front_s
        self._whole = {name: Bins() for name in ("ttft", "tpot", "e2e")}
        self._now = {name: Bins() for name in ("ttft", "tpot", "e2e")}
        self._sums = np.zeros(4)
        """Tokens, and tokens by threshold, agreement, accuracy."""
        self._ended: list[Array] = []
        self._curve: dict[float, tuple[float, float, float]] = {}
        self._tokens_before: Array = np.zeros(0)
        self._counts = dict.fromkeys(("arrived", "refused", "ended", "good"), 0)
        self._totals = dict.fromkeys(("arrived", "refused", "ended", "good", "too_long"), 0)
        self.last_end_s = 0.0
        self.seconds: list[Second] = []

    def came(self, arrived: int, refused: int, too_long: int) -> None:
        """Count requests."""
        self._counts["arrived"] += arrived
        self._counts["refused"] += refused + too_long
        self._totals["too_long"] += too_long

    def ended(self, arrival: Array, first: Array, end: Array, tokens: Array) -> None:
        """Count requests that ended, by the times of the engine."""
        if len(end):
            self._ended.append(np.stack([arrival, first, end, tokens]))

    def _count_ended(self) -> None:
        if not self._ended:
            return
        arrival, first, end, tokens = np.concatenate(self._ended, axis=1)
        self._ended = []
        ttft, e2e = first - arrival + 2 * self._front_s, end - arrival + 2 * self._front_s
        several = tokens > 1
        tpot = np.where(several, (end - first) / np.maximum(tokens - 1, 1), 0.0)
        for name, seconds in (("ttft", ttft), ("tpot", tpot[several]), ("e2e", e2e)):
            self._now[name].add(seconds)
            self._whole[name].take(self._now[name])
        self._counts["ended"] += len(end)
        self.last_end_s = max(self.last_end_s, float(end.max()) + self._front_s)
        if (promise := self._promise) is not None:
            kept = np.ones(len(end), bool)
            for seconds, limit_s in ((ttft, promise.ttft_s), (tpot, promise.tpot_s), (e2e, promise.e2e_s)):
                if limit_s is not None:
                    kept &= seconds <= limit_s
            self._counts["good"] += int(kept.sum())

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
        """End a second, in which `thresholds_NC` were in force; `tokens_NC` are counted since the start."""
        self._count_ended()
        before = self._tokens_before if self._tokens_before.size else np.zeros_like(tokens_NC)
        sums, counts = self._quality(tokens_NC - before, thresholds_NC), self._counts
        self._tokens_before = tokens_NC.copy()
        self._sums += sums
        means = (sums[1:] / sums[0]).tolist() if sums[0] > 0 else [None] * 3
        done = counts["ended"] + counts["refused"]
        self.seconds.append(
            Second(
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
                good=counts["good"] / done if done and self._promise else None,
            )
        )
        for name in counts:
            self._totals[name] += counts[name]
        self._counts = dict.fromkeys(counts, 0)
        self._now = {name: Bins() for name in self._now}

    def figures(self, *, in_flight: int, changes_per_minute: float, replica_minutes: float) -> Figures:
        """Return what all seconds say together."""
        totals, tokens = self._totals, float(self._sums[0])
        duration_s = self.last_end_s if not in_flight else float(len(self.seconds))
        means = (self._sums[1:] / tokens).tolist() if tokens else [None] * 3
        return Figures(
            duration_s=duration_s,
            requests=totals["arrived"],
            ended=totals["ended"],
            refused=totals["refused"] - totals["too_long"],
            too_long=totals["too_long"],
            in_flight=in_flight,
            tokens=tokens,
            tokens_per_s=tokens / duration_s if duration_s else 0.0,
            ttft_ms=_spread(self._whole["ttft"]),
            tpot_ms=_spread(self._whole["tpot"]),
            e2e_ms=_spread(self._whole["e2e"]),
            good=totals["good"] / (totals["ended"] + totals["refused"])
            if self._promise and totals["ended"] + totals["refused"]
            else None,
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


def _spread(bins: Bins) -> Spread | None:
    if bins.mean_s is None:
        return None
    p50, p90, p95, p99 = (1000 * (bins.quantile_s(share) or 0.0) for share in (0.5, 0.9, 0.95, 0.99))
    return Spread(mean=1000 * bins.mean_s, p50=p50, p90=p90, p95=p95, p99=p99)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def columns(seconds: Sequence[Second]) -> dict[str, list[float | None]]:
    """Return the series by name."""
    return {name: [getattr(second, name) for second in seconds] for name in Second.__dataclass_fields__}
