"""Count on the device what lookahead gains: tokens, drafts, and confidences at masks, for a controller and metrics.

Letters: S slots, C columns, K masks of the full block, G thresholds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LookaheadRecord:
    """Counts since the engine started, as plain numbers."""

    forwards: int
    """Steps of single requests that yielded tokens; a step with 4 requests counts 4 times."""
    tokens: int
    """Tokens that these forwards yielded, before stop conditions cut them."""
    accepted: int
    """Tokens kept because of the threshold: accepted at masks without verification, or drafts that are not the model's
    own choice."""
    drafts: int
    """Drafts that were verified."""
    right: int
    """Drafts that were right, or kept."""
    positions: int
    """Rows of logits: known tokens, drafts, masks and padding."""
    thresholds: tuple[float, ...]
    looked: tuple[int, ...]
    """Forwards that read the k-th mask."""
    passed: tuple[tuple[int, ...], ...]
    """For each of `thresholds`: forwards in which the k-th mask and all masks before it reach the threshold."""


class LookaheadCounters:
    """Counts of one worker, by slot, so that the kernel that counts a step needs no atomic operations."""

    def __init__(self, masks: int, slots: int, thresholds: Sequence[float], device: torch.device) -> None:
        self._thresholds = tuple(thresholds)
        self.threshold_G = torch.tensor([*thresholds, 0.0], device=device)
        """Thresholds of the grid, and 0, which every mask reaches that is read."""
        self.sum_SC = torch.zeros(slots, 6, dtype=torch.int64, device=device)
        """The first six numbers of a record."""
        self.passed_SGK = torch.zeros(slots, len(self.threshold_G), masks, dtype=torch.int64, device=device)

    def record(self) -> LookaheadRecord:
        """Return the counts, after the steps in flight."""
        forwards, tokens, accepted, drafts, right, positions = self.sum_SC.sum(dim=0).tolist()
        *passed, looked = map(tuple, self.passed_SGK.sum(dim=0).tolist())
        return LookaheadRecord(
            forwards=forwards,
            tokens=tokens,
            accepted=accepted,
            drafts=drafts,
            right=right,
            positions=positions,
            thresholds=self._thresholds,
            looked=looked,
            passed=tuple(passed),
        )
