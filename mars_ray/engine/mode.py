"""How the tokens of a sequence are made; apart from `request`, so that a command line need not load torch."""

from enum import StrEnum


class Mode(StrEnum):
    """How the tokens of a sequence are made."""

    AR = "ar"
    """One per forward."""
    THRESHOLD = "threshold"
    """Those whose confidence passes the threshold (arXiv 2604.07023, section 3.3)."""
    EXACT = "exact"
    """As in threshold mode, but each is compared with the autoregressive choice before it leaves the engine."""
