"""The decoding modes and the default threshold, apart from `request`, so that a command line need not load torch."""

from enum import StrEnum

DEFAULT_THRESHOLD = 1.0
"""Threshold where nobody names one. At 1 every token ahead is verified, so answers are those of one token at a time,
only sooner."""


class Mode(StrEnum):
    """How the tokens of a sequence are made."""

    AR = "ar"
    """One token per forward."""
    THRESHOLD = "threshold"
    """Tokens at masks are accepted while their confidence passes the threshold (arXiv 2604.07023, section 3.3)."""
    EXACT = "exact"
    """Tokens at masks are drafts, each compared with the autoregressive choice before it leaves the engine."""
