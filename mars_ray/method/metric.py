"""The metrics that are compared with the threshold, for one confidence at a time.

Apart from `acceptance`, so that a server that only passes requests on need not load torch.

Source: arXiv 2604.07023, section 3.3 and its comparison of metrics.
"""

from enum import StrEnum
from math import exp


class Metric(StrEnum):
    """The confidence that is compared with the threshold."""

    PROBABILITY = "probability"
    """Probability of the most likely token, accepted when >= threshold."""
    ENTROPY = "entropy"
    """Entropy of the distribution in nats, accepted when <= threshold."""
    MARGIN = "margin"
    """Probability of the most likely token less that of the second, accepted when >= threshold."""


def accepts_nothing(threshold: float, metric: Metric) -> bool:
    """Return whether nothing can pass the threshold, so that the answer is that of autoregressive decoding."""
    return threshold <= 0 if metric is Metric.ENTROPY else threshold >= 1


def passes(certainty: float, threshold: float, metric: Metric) -> bool:
    """Return whether one confidence passes the threshold."""
    if accepts_nothing(threshold, metric):
        return False
    return certainty <= threshold if metric is Metric.ENTROPY else certainty >= threshold


def least_probability(certainty: float, metric: Metric) -> float:
    """Return a lower bound of the probability of the most likely token, from its confidence."""
    return exp(-certainty) if metric is Metric.ENTROPY else certainty
