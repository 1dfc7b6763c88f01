"""Decide which predictions to draft and where masks stand, so that the next forward verifies and looks ahead at once.

The confidence of a draft estimates the probability that it is right. All drafts before it must be right too, so the
product of their confidences says how likely the next forward takes it (speculative decoding, arXiv 2211.17192).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

COLUMNS_MOST = 63
"""Limit of the drafts and masks of one sequence with several rows of masks; `ForwardBatch.behind_N` has 63 bits."""

DRAFT_POSITIONS = 2
"""Positions of one more draft: its own, and about one for masks behind it."""

FIXED_PRICE = 0.05
"""Price of a position in tokens for requests whose answers must not depend on the load (see `masks_behind_drafts`)."""


def masks_behind_drafts(
    confidences: Sequence[float], worth_K: Sequence[float], price: float, most: Sequence[int]
) -> tuple[int, ...]:
    """Return the number of masks behind the last token and behind each draft.

    Each draft may be the last right one, and then the masks behind it are read (quadratic decoding, arXiv 2507.11851).
    `confidences` are the probabilities that a draft is right if those before it are. The k-th mask of the row that is
    read gains `worth_K[k]` tokens, a position costs `price` tokens, and a row has at most `most` masks. Where the rows
    have more than `COLUMNS_MOST` drafts and masks, all masks stand behind the last draft.
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
    """Return `masks` masks behind the last draft and none elsewhere."""
    return (*(0 for _ in range(drafts)), masks)
