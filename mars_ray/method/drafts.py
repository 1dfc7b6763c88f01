"""Decide where to place masks after drafts, so that one forward both verifies the drafts and looks further ahead.

The confidence of a draft estimates the probability that it is right if all drafts before it are right. The product of
the confidences up to a draft therefore estimates the probability that the next forward takes it (speculative decoding,
arXiv 2211.17192).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

COLUMNS_MOST = 63
"""Maximum number of drafts and masks in a sequence with several rows of masks: `ForwardBatch.behind_N` has 63 bits."""

DRAFT_POSITIONS = 2
"""Positions that each additional draft takes up: one for itself, and about one for the masks that follow it."""

FIXED_PRICE = 0.05
"""Price of a position in tokens, for requests whose answers must not depend on the load (see `masks_behind_drafts`)."""


def masks_behind_drafts(
    confidences: Sequence[float], worth_K: Sequence[float], price: float, most: Sequence[int]
) -> tuple[int, ...]:
    """Return how many masks to place after the last token and after each draft.

    Any draft may turn out to be the last right one, and then only the row of masks after it is used (quadratic
    decoding, arXiv 2507.11851). `confidences` are the probabilities that each draft is right if all drafts before it
    are right.

    If a row is used, its k-th mask gains `worth_K[k]` tokens. A position costs `price` tokens. `most` is the maximum
    number of masks in each row. If the drafts and masks would exceed `COLUMNS_MOST`, all masks follow the last draft.
    """
    right = [*accumulate(confidences, mul, initial=1.0), 0.0]  # probability that at least n drafts are right
    rows = []
    for (at_least, more), limit in zip(pairwise(right), most, strict=True):
        read = at_least - more
        count = next((k for k, worth in enumerate(worth_K[:limit]) if read * worth < price), min(limit, len(worth_K)))
        rows.append(count)
    if any(rows[:-1]) and len(confidences) + sum(rows) > COLUMNS_MOST:
        return masks_behind_the_last(len(confidences), most[-1])
    return tuple(rows)


def masks_behind_the_last(drafts: int, masks: int) -> tuple[int, ...]:
    """Return rows with `masks` masks after the last draft and none elsewhere."""
    return (*(0 for _ in range(drafts)), masks)
