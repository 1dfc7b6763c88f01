"""Count how often tokens that a threshold kept equal the model's own choice, found one forward later.

Letters: G thresholds of the grid, J judged tokens.
"""

import numpy as np

from mars_ray.engine.stats.grid import GRID, decay
from mars_ray.engine.stats.lookahead import Floats


class Audits:
    """Decayed counts of audited tokens at each threshold."""

    def __init__(self) -> None:
        self._new: list[tuple[float, list[float], list[bool]]] = []
        self.audited_G: Floats = np.zeros(len(GRID))
        """Tokens that were judged."""
        self.agreed_G: Floats = np.zeros(len(GRID))
        """Tokens among them that equal the model's own choice."""

    def observe(self, threshold: float, confidences: list[float], right: list[bool]) -> None:
        """Record an audit (see `Profile.observe_audit`)."""
        self._new.append((threshold, confidences, right))

    def fold(self) -> None:
        """Add the new audits to the counts."""
        new, self._new = self._new, []
        keep = decay(len(new))
        self.audited_G *= keep
        self.agreed_G *= keep
        grid_G1 = np.array(GRID)[:, None]
        for threshold, confidences, right in new:
            judged = min(len(confidences), len(right))
            least_J = np.minimum.accumulate(np.array(confidences[:judged], dtype=float))
            counts_GJ = (least_J >= grid_G1) & (grid_G1 >= threshold)
            self.audited_G += counts_GJ.sum(axis=1)
            self.agreed_G += (counts_GJ & np.array(right[:judged], dtype=bool)).sum(axis=1)
