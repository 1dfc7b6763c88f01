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
    """Tokens ahead are kept while they reach the threshold: by their confidence at masks (arXiv 2604.07023, section
    3.3), or with an adapter once they are verified (see `Acceptance`)."""
    EXACT = "exact"
    """Tokens at masks are drafts, returned only if they equal the autoregressive choice."""
