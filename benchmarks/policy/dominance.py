"""Find who is beaten in everything: at the same load another meets the SLO more often and answers better."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

SIGMAS = 2.0
"""Standard errors of the mean difference over the parts that a win must be larger than."""
LEAST = 0.0005
"""No smaller difference counts, in requests that meet the SLO or in right answers."""


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """One contender in one part of a trace."""

    good: float
    """Share of the requests that met the SLO."""
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanScore:
    """One contender over all parts."""

    good: float
    good_std: float
    accuracy: float
    accuracy_std: float


def mean_of(scores: Sequence[PolicyScore]) -> MeanScore:
    """Return means and standard deviations."""
    good, accuracy = [each.good for each in scores], [each.accuracy for each in scores]
    return MeanScore(good=mean(good), good_std=_std(good), accuracy=mean(accuracy), accuracy_std=_std(accuracy))


def dominated(found: Mapping[str, Sequence[PolicyScore]]) -> list[tuple[str, str]]:
    """Return (beaten, winner) for each pair in which the winner is better in both figures, part by part."""
    return [
        (beaten, winner)
        for beaten, mine in found.items()
        for winner, theirs in found.items()
        if _more([each.good for each in theirs], [each.good for each in mine])
        and _more([each.accuracy for each in theirs], [each.accuracy for each in mine])
    ]


def _more(one: Sequence[float], other: Sequence[float]) -> bool:
    differences = [a - b for a, b in zip(one, other, strict=True)]
    return mean(differences) > LEAST + SIGMAS * _std(differences) / math.sqrt(len(differences))


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
