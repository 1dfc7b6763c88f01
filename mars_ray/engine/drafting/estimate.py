"""Estimate the probability that a draft is right, from what verification said about earlier drafts of its source.

A logistic regression learns online: each verified draft moves the weights by a step of Newton's method on the diagonal
of the curvature, which forgets old drafts, because texts and loads change.

Source: the diagonal Laplace approximation of Chapelle and Li, "An Empirical Evaluation of Thompson Sampling" (2011),
algorithm 3, with forgetting.
"""

import math
from collections.abc import Sequence

KEEP = 1 - 1 / 4096
"""Factor by which a verified draft decays the curvature of earlier drafts, for each of its features."""

CERTAIN = 12.0
"""Bound of the log-odds, because nothing is certain."""


class AcceptanceEstimate:
    """Probability that a draft is right, by its features."""

    def __init__(self, weights: Sequence[float], *, prior_drafts: float = 64.0) -> None:
        """Start with `weights`, which weigh as much as the observations of `prior_drafts` drafts."""
        self.weights = list(weights)
        self._curvature = [prior_drafts / 4] * len(self.weights)
        self.observed = 0.0
        """Decayed number of observed drafts."""

    def probability(self, features: Sequence[float]) -> float:
        """Return the estimate for a draft with these features. The first feature is usually the constant 1."""
        odds = sum(weight * feature for weight, feature in zip(self.weights, features, strict=True))
        return 1 / (1 + math.exp(-max(-CERTAIN, min(CERTAIN, odds))))

    def observe(self, features: Sequence[float], right: bool) -> None:
        """Learn whether a draft with these features was right."""
        probability = self.probability(features)
        error = right - probability
        curve = probability * (1 - probability)
        for number, feature in enumerate(features):
            if not feature:  # says nothing about its weight, which must not become less sure
                continue
            self._curvature[number] = KEEP * self._curvature[number] + curve * feature * feature
            self.weights[number] += error * feature / self._curvature[number]
        self.observed = KEEP * self.observed + 1
