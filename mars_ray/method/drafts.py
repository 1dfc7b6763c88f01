"""Decide where to place masks after drafts, so that one forward both verifies the drafts and looks further ahead.

The confidence of a draft estimates the probability that it is right if all drafts before it are right. The product of
the confidences up to a draft therefore estimates the probability that the next forward takes it (speculative decoding,
arXiv 2211.17192).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, pairwise
from operator import mul

COLUMNS_MOST = 63
"""Maximum number of drafts and masks in a sequence with several rows of masks: `ForwardBatch.behind_N` has 63 bits."""

DRAFT_POSITIONS = 2
"""Positions that each additional draft takes up: one for itself, and about one for the masks that follow it."""

LEAST_PRICE = 0.01
"""Minimum price of a position in tokens."""


@dataclass(frozen=True, slots=True)
class PositionPrice:
    """Price of the drafts and masks of a sequence in a step, in tokens.

    A step waits for the weights, whatever its size, so the first positions take little time of their own.
    """

    tokens: float
    """Price of a position: the number of tokens that the engine generates in the time of the position."""
    cheap: int = 0
    """Number of positions, counted from the first, that cost only `cheap_tokens`."""
    cheap_tokens: float = LEAST_PRICE
    """Price of each of the first `cheap` positions, at most `tokens`."""

    def of_position(self, number: int) -> float:
        """Return the price of the position at index `number`."""
        return self.cheap_tokens if number < self.cheap else self.tokens

    def of_draft(self, number: int) -> float:
        """Return the price of the draft at index `number` and of its masks."""
        first = DRAFT_POSITIONS * number
        return sum(map(self.of_position, range(first, first + DRAFT_POSITIONS)))


FIXED_PRICE = PositionPrice(0.05)
"""Price for requests whose answers must not depend on the load."""


def masks_behind_drafts(
    confidences: Sequence[float], worth_K: Sequence[float], price: PositionPrice, most: Sequence[int]
) -> tuple[int, ...]:
    """Return how many masks to place after the last token and after each draft.

    Any draft may turn out to be the last right one, and then only the row of masks after it is used (quadratic
    decoding, arXiv 2507.11851). `confidences` are the probabilities that each draft is right if all drafts before it
    are right.

    If a row is used, its k-th mask gains `worth_K[k]` tokens. Masks are placed in the order of their expected gain,
    while the next one gains at least the `price` of one more position. `most` is the maximum number of masks in each
    row. If the drafts and masks would exceed `COLUMNS_MOST`, all masks follow the last draft.
    """
    right = [*accumulate(confidences, mul, initial=1.0), 0.0]  # probability that at least n drafts are right
    read = [at_least - more for at_least, more in pairwise(right)]
    rows = [0] * len(read)
    columns = len(confidences)
    gains = [
        (-chance * worth_K[0], row)
        for row, (chance, limit) in enumerate(zip(read, most, strict=True))
        if limit and worth_K
    ]
    """Heap of the next mask in each row: its expected gain, negated, and the row."""
    heapify(gains)
    while gains and -gains[0][0] >= price.of_position(columns):
        row = gains[0][1]
        rows[row] += 1
        columns += 1
        if columns > COLUMNS_MOST and any(rows[:-1]):
            return masks_behind_the_last(len(confidences), most[-1])
        if rows[row] < min(most[row], len(worth_K)):
            heapreplace(gains, (-read[row] * worth_K[rows[row]], row))
        else:
            heappop(gains)
    return tuple(rows)


def masks_behind_the_last(drafts: int, masks: int) -> tuple[int, ...]:
    """Return rows with `masks` masks after the last draft and none elsewhere."""
    return (*(0 for _ in range(drafts)), masks)
