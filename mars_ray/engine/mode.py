"""The decoding modes and the default threshold, in a module that loads no torch."""

from enum import StrEnum

DEFAULT_THRESHOLD = 1.0
"""Threshold of requests that name none. At 1 every token ahead is verified, so the answers are those of one token at a
time."""


class Mode(StrEnum):
    """Ways of decoding a sequence."""

    AR = "ar"
    """One token per forward."""
    THRESHOLD = "threshold"
    """Accept tokens at masks while their confidence passes the threshold (arXiv 2604.07023, section 3.3)."""
    EXACT = "exact"
    """Treat tokens at masks as drafts, and return them only if they equal the autoregressive choice."""
