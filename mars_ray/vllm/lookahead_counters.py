"""Count on the device what lookahead gains: tokens, drafts, and confidences at masks, for a controller and metrics.

Letters: R requests of a step, K masks of the full block, G thresholds of the grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mars_ray.vllm.step_layout import StepLayout
from mars_ray.vllm.step_outcome import StepOutcome


@dataclass(frozen=True, slots=True)
class LookaheadRecord:
    """Counts since the engine started, as plain numbers."""

    forwards: int
    """Steps of single requests that yielded tokens; a step with 4 requests counts 4 times."""
    tokens: int
    """Tokens that these forwards yielded, before stop conditions cut them."""
    accepted: int
    """Tokens accepted at masks without verification."""
    drafts: int
    """Drafts that were verified."""
    right: int
    """Drafts that were right."""
    positions: int
    """Rows of logits: known tokens, drafts, masks and padding."""
    thresholds: tuple[float, ...]
    looked: tuple[int, ...]
    """Forwards that read the k-th mask."""
    passed: tuple[tuple[int, ...], ...]
    """For each of `thresholds`: forwards in which the k-th mask and all masks before it reach the threshold."""


class LookaheadCounters:
    """Counts of one worker. Adding a step needs no synchronisation with the device."""

    def __init__(self, masks: int, thresholds: Sequence[float], device: torch.device) -> None:
        self._thresholds = tuple(thresholds)
        self._threshold_G = torch.tensor(self._thresholds, device=device)
        self._sums = torch.zeros(6, dtype=torch.int64, device=device)
        self._looked_K = torch.zeros(masks, dtype=torch.int64, device=device)
        self._passed_GK = torch.zeros(len(self._thresholds), masks, dtype=torch.int64, device=device)

    def add(self, layout: StepLayout, outcome: StepOutcome) -> None:
        """Count one step."""
        samples_R = layout.samples_R
        counts = (samples_R, outcome.num_sampled_R, outcome.accepted_R, layout.drafts_R, outcome.right_R, layout.rows_R)
        self._sums += torch.stack([count_R.where(samples_R, 0).sum() for count_R in counts])
        is_read_RK = ~outcome.mask_confidence_RK.isnan()
        self._looked_K += is_read_RK.sum(dim=0)
        passes_GRK = outcome.mask_confidence_RK[None] >= self._threshold_G[:, None, None]
        self._passed_GK += passes_GRK.long().cumprod(dim=2).sum(dim=1)

    def record(self) -> LookaheadRecord:
        """Return the counts, after the steps in flight."""
        forwards, tokens, accepted, drafts, right, positions = self._sums.tolist()
        return LookaheadRecord(
            forwards=forwards,
            tokens=tokens,
            accepted=accepted,
            drafts=drafts,
            right=right,
            positions=positions,
            thresholds=self._thresholds,
            looked=tuple(self._looked_K.tolist()),
            passed=tuple(map(tuple, self._passed_GK.tolist())),
        )
