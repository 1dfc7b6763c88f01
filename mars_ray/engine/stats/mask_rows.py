"""Where masks stand beside the drafts of a sequence: behind each that may turn out to be the last right one.

A wrong draft voids what was computed behind it. Masks behind every draft, and behind the last token, leave a row to
read wherever verification ends; Apple calls that quadratic decoding (arXiv 2507.11851). Here each row is as long as
the chance that it is the one read is worth.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from mars_ray.engine.scheduling.scheduler import Masks


def mask_rows(confidences: Sequence[float], worth_K: Sequence[float], price: float, most: Sequence[int]) -> Masks:
    """Return how many masks stand behind the last token and behind each draft.

    `confidences` are the chances of the drafts to be right where those before them are. The k-th mask of the row that
    is read is worth `worth_K[k]` tokens, and a position costs `price` tokens. A row has at most `most` masks.
    """
    right = [*accumulate(confidences, mul, initial=1.0), 0.0]  # that so many drafts and no fewer are right
    rows = []
    for (so_far, further), limit in zip(pairwise(right), most, strict=True):
        read = so_far - further
        count = next((k for k, worth in enumerate(worth_K[:limit]) if read * worth < price), min(limit, len(worth_K)))
        rows.append(count)
    return tuple(rows)
