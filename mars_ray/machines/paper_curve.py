"""Published tokens per forward and accuracy at each threshold: arXiv 2604.07023, Qwen2.5-7B, block 4, GSM8K."""

from typing import NamedTuple

PAPER_BLOCK = 4
PAPER_SOURCE = "arXiv 2604.07023, Qwen2.5-7B, block 4, GSM8K"


class PaperPoint(NamedTuple):
    """Published figures at one threshold."""

    threshold: float
    tokens_per_forward: float
    """Measured without verification: a forward gives one token, plus the tokens at masks whose confidence reaches the
    threshold."""
    accuracy: float


PAPER_CURVE = (
    PaperPoint(1.0, 1.00, 0.732),
    PaperPoint(0.95, 1.79, 0.710),
    PaperPoint(0.9, 1.96, 0.703),
    PaperPoint(0.8, 2.19, 0.677),
    PaperPoint(0.7, 2.37, 0.638),
    PaperPoint(0.6, 2.55, 0.603),
    PaperPoint(0.5, 2.77, 0.560),
)
"""Published figures, from the highest threshold downwards."""
