"""The thresholds for which an engine keeps counts, and how fast counts forget."""

import math

GRID = (1.0, 0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
"""Thresholds on the probability. At 1 only the model's own choices are kept."""

HALF_LIFE = 4096
"""Number of forwards after which the weight of an observation has halved."""

KEEP_RECENT = 0.5 ** (1 / 1024)
"""Factor by which a new observation decays the earlier ones if what is observed changes with load."""


def decay(observations: int) -> float:
    """Return the factor by which new observations decay the earlier ones."""
    return math.pow(0.5, observations / HALF_LIFE)
