"""The comparison of a new version of a model with the present one, on the answers to real requests.

In:    for answers of each version, the share of tokens that the present version would have chosen; failures.
Out:   a verdict: promote the new version, take it back, or go on.
Never: promotes a version without enough answers, or one that fails more often than the present one.

The present version agrees with its own answers only in part as well, because thresholds below 1 and sampling choose
other tokens than autoregressive decoding would. So the judgement is about the difference of two means.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from mars_ray.platform.models.registry import Canary

DEVIATIONS = 2.0
"""Standard errors by which a difference must be beyond a bound."""
PATIENCE = 10
"""Multiple of `samples` after which a new version that is not clearly as good is taken back."""
FAILURES = 3
"""Failures of the new version below which it is not taken back for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """What a gateway saw of one version since its last report."""

    number: int
    """Number of the version."""
    answers: int = 0
    failures: int = 0
    agreements: Sequence[float] = ()
    """Share of the tokens of an answer that the present version would have chosen, for some answers."""


class Verdict(NamedTuple):
    """The end of a comparison."""

    promote: bool
    reason: str


@dataclass(slots=True)
class _Version:
    answers: int = 0
    failures: int = 0
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance_of_mean(self) -> float:
        # One answer more with the worst deviation keeps a few equal answers from looking certain.
        spread = max(0.0, self.squares / self.count - self.mean**2)
        return (spread * self.count + self.mean**2 / self.count) / self.count**2


@dataclass(slots=True)
class CanaryJudge:
    """Compares the version with the number `new` with the version `present`."""

    present: int
    new: int
    canary: Canary
    _versions: dict[int, _Version] = field(default_factory=dict)

    def add(self, report: CanaryReport) -> None:
        """Take a report; reports about other versions are ignored."""
        if report.number not in (self.present, self.new):
            return
        version = self._versions.setdefault(report.number, _Version())
        version.answers += report.answers
        version.failures += report.failures
        for share in report.agreements:
            version.count += 1
            version.total += share
            version.squares += share * share

    def verdict(self) -> Verdict | None:
        """Return the verdict; None while the answers do not decide."""
        present = self._versions.get(self.present, _Version())
        new = self._versions.get(self.new, _Version())
        if new.failures >= FAILURES and _more_failures(new, present):
            return Verdict(False, f"{new.failures} of {new.answers + new.failures} requests failed")
        if min(new.count, present.count) < self.canary.samples:
            return None
        difference = new.mean - present.mean
        error = DEVIATIONS * sqrt(new.variance_of_mean + present.variance_of_mean)
        reason = (
            f"agreement {new.mean:.3f} of {new.count} answers, present version {present.mean:.3f} of {present.count}"
        )
        if difference - error >= -self.canary.tolerance:
            return Verdict(True, reason)
        if difference + error < -self.canary.tolerance or new.count >= PATIENCE * self.canary.samples:
            return Verdict(False, reason)
        return None

    def summary(self) -> str:
        """Return what is known so far, in a line."""
        parts = []
        for title, number in (("new", self.new), ("present", self.present)):
            version = self._versions.get(number, _Version())
            agreement = f"{version.mean:.3f}" if version.count else "not measured"
            parts.append(
                f"{title}: {version.answers} answers, {version.failures} failures, agreement {agreement} "
                f"({version.count} compared)"
            )
        return "; ".join(parts)


def _more_failures(new: _Version, present: _Version) -> bool:
    """Return whether the new version fails more often, beyond chance."""
    new_all, present_all = new.answers + new.failures, present.answers + present.failures
    rate = (new.failures + present.failures) / (new_all + present_all)
    error = sqrt(rate * (1 - rate) * (1 / new_all + 1 / max(1, present_all)))
    present_rate = present.failures / present_all if present_all else 0.0
    return new.failures / new_all - present_rate > DEVIATIONS * error
