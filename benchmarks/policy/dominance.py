"""Find dominated contenders: another one meets the SLO more often at the same load, and is more accurate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from mars_ray.measure import deviation

SIGMAS = 2.0
"""Smallest difference that counts, in standard errors of the mean over the parts."""
LEAST = 0.0005
"""Smallest difference that counts, as a share of requests or answers."""


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """Scores of one contender in one part of a trace."""

    good: float
    """Share of the requests that met the SLO."""
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanScore:
    """Scores of one contender over all parts."""

    good: float
    good_std: float
    accuracy: float
    accuracy_std: float


def mean_of(scores: Sequence[PolicyScore]) -> MeanScore:
    """Return means and standard deviations."""
    good = [score.good for score in scores]
    accuracy = [score.accuracy for score in scores]
    return MeanScore(
        good=mean(good), good_std=deviation(good), accuracy=mean(accuracy), accuracy_std=deviation(accuracy)
    )


def dominated(scores: Mapping[str, Sequence[PolicyScore]]) -> list[tuple[str, str]]:
    """Return (loser, winner) for each pair in which the winner is better in both scores."""
    return [
        (loser, winner)
        for loser, worse in scores.items()
        for winner, better in scores.items()
        if _more([score.good for score in better], [score.good for score in worse])
        and _more([score.accuracy for score in better], [score.accuracy for score in worse])
    ]


def _more(one: Sequence[float], other: Sequence[float]) -> bool:
    differences = [a - b for a, b in zip(one, other, strict=True)]
    return mean(differences) > LEAST + SIGMAS * deviation(differences) / math.sqrt(len(differences))
