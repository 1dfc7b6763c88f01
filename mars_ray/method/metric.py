"""Confidence metrics, and the comparison of one confidence with a threshold.

This module is separate from `acceptance`, so that a server that only forwards requests need not load torch.

Source: arXiv 2604.07023, section 3.3 and its comparison of metrics.
"""

from enum import StrEnum
from math import exp


class Metric(StrEnum):
    """Measure of confidence to compare with the threshold."""

    PROBABILITY = "probability"
    """Probability of the most likely token, which is accepted at or above the threshold."""
    ENTROPY = "entropy"
    """Entropy of the distribution in nats. A token is accepted at or below the threshold."""
    MARGIN = "margin"
    """Probability of the most likely token minus that of the second most likely. A token is accepted at or above the
    threshold."""


def accepts_nothing(threshold: float, metric: Metric) -> bool:
    """Return whether no confidence passes the threshold, so that the answer equals autoregressive decoding."""
    return threshold <= 0 if metric is Metric.ENTROPY else threshold >= 1


def passes(confidence: float, threshold: float, metric: Metric) -> bool:
    """Return whether a confidence passes the threshold."""
    if accepts_nothing(threshold, metric):
        return False
    return confidence <= threshold if metric is Metric.ENTROPY else confidence >= threshold


def least_probability(confidence: float, metric: Metric) -> float:
    """Return a lower bound on the probability of the most likely token, given the confidence."""
    return exp(-confidence) if metric is Metric.ENTROPY else confidence
