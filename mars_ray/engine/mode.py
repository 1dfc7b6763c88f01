"""The decoding modes and the default threshold, in a module that loads no torch."""

from enum import StrEnum

DEFAULT_THRESHOLD = 1.0
"""Threshold of requests that do not set one. At 1 every proposed token is verified, so answers equal those of decoding
one token at a time."""


class Mode(StrEnum):
    """Decoding modes of a sequence."""

    AR = "ar"
    """One token per forward."""
    THRESHOLD = "threshold"
    """Tokens at masks are accepted while their confidence passes the threshold (arXiv 2604.07023, section 3.3)."""
    EXACT = "exact"
    """Tokens at masks are drafts, returned only if they equal the autoregressive choice."""
