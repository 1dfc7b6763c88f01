"""Keep the latest forwards of single requests on the device, so that a profile by threshold can be computed from them.

A forward takes one row. Adding a step needs no synchronisation with the device.

Letters: R requests of a step, Q positions of the widest request, K masks of the full block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mars_ray.vllm.step_layout import StepLayout
from mars_ray.vllm.step_outcome import StepOutcome, StepPredictions, columns

CAPACITY = 1024
"""Number of forwards that are kept."""


class LoggedForward(NamedTuple):
    """A forward of one request that yielded tokens."""

    threshold: float
    mask_confidences: list[float]
    """Confidences at the masks that were read; empty if a wrong draft made the masks void."""
    tokens: list[int]
    """The next token, and the predictions at the masks that were read."""
    drafts: list[int]
    """Verified drafts."""
    draft_confidences: list[float]
    """Confidences of the drafts when they were predicted."""
    right: int
    """Drafts that were right along with all drafts before them."""
    accepted_confidences: list[float]
    """Confidences of the tokens that the previous forward accepted at masks."""
    agreed: list[bool]
    """Whether each of these tokens is the most likely one, given all tokens before it. It ends where a token was drawn
    that is not the most likely one."""


class ForwardLog:
    """The forwards of one worker with `slots` requests at most."""

    def __init__(self, masks: int, slots: int, device: torch.device) -> None:
        self.masks = masks
        """Masks of the full block."""
        self._row_FC = torch.full((CAPACITY, 5 * masks + 6), torch.nan, device=device)
        self._confidence_SK = torch.zeros(slots, masks, device=device)
        """Confidences at the masks in the last forward of the request in each slot."""
        self._accepted_S = torch.zeros(slots, dtype=torch.int64, device=device)
        """Tokens that this forward accepted."""
        self._next = 0

    def begin(self, slot: int) -> None:
        """Forget the last forward in a slot, which gets another request."""
        self._accepted_S[slot] = 0

    def add(
        self,
        slot_R: Tensor,
        layout: StepLayout,
        fed_RQ: Tensor,
        threshold_R: Tensor,
        predictions: StepPredictions,
        outcome: StepOutcome,
    ) -> None:
        """Add a step that fed `fed_RQ`."""
        width, masks = fed_RQ.shape[1], self.masks
        column_1K = torch.arange(masks, device=slot_R.device)[None]
        accepted_R = self._accepted_S[slot_R]
        agrees_RQ = predictions.token_RQ == fed_RQ.roll(-1, dims=1)
        judged_RQ = torch.where(predictions.is_argmax_RQ, agrees_RQ.float(), torch.nan)
        first_draft_R = layout.known_R.clamp(0, width - 1)
        mask_R = layout.drafts_R + 1  # column of the first prediction at a mask, among those that choose tokens
        parts = (
            outcome.mask_confidence_RK,
            self._confidence_SK[slot_R],
            columns(judged_RQ, column_1K),
            columns(outcome.token_RQ, mask_R[:, None] + column_1K).float(),
            columns(fed_RQ, first_draft_R[:, None] + column_1K).float(),
            torch.stack(
                [
                    threshold_R,
                    outcome.token_RQ.gather(1, outcome.right_R[:, None])[:, 0].float(),
                    layout.drafts_R.float(),
                    outcome.right_R.float(),
                    accepted_R.float(),
                    layout.samples_R.float(),
                ],
                dim=1,
            ),
        )
        requests = slot_R.shape[0]
        if self._next + requests > CAPACITY:
            self._row_FC[self._next :] = torch.nan
            self._next = 0
        self._row_FC[self._next : self._next + requests] = torch.cat(parts, dim=1)
        self._next += requests
        self._confidence_SK[slot_R] = outcome.mask_confidence_RK
        self._accepted_S[slot_R] = outcome.accepted_R

    def drain(self) -> list[LoggedForward]:
        """Return the forwards since the last call, at most `CAPACITY`, after the steps in flight."""
        rows = self._row_FC.cpu().tolist()
        self._row_FC.fill_(torch.nan)
        self._next = 0
        return list(self._read(rows))

    def _read(self, rows: list[list[float]]) -> Iterator[LoggedForward]:
        masks = self.masks
        for row in rows:
            threshold, token, drafts, right, accepted, samples = row[5 * masks :]
            if samples != 1:  # a part of a prompt, or an empty row
                continue
            confidences, before, agreed, at_masks, fed = (row[part * masks : (part + 1) * masks] for part in range(5))
            num_drafts, num_accepted = int(drafts), int(accepted)
            read = [confidence for confidence in confidences if confidence == confidence]  # NaN where none was read
            judged = agreed[:num_accepted]
            judged = judged[: next((k for k, agrees in enumerate(judged) if agrees != agrees), None)]
            yield LoggedForward(
                threshold=threshold,
                mask_confidences=read,
                tokens=[int(token), *map(int, at_masks[: len(read)])],
                drafts=[int(draft) for draft in fed[:num_drafts]],
                draft_confidences=before[num_accepted : num_accepted + num_drafts],
                right=int(right),
                accepted_confidences=before[:num_accepted],
                agreed=[agrees == 1 for agrees in judged],
            )
