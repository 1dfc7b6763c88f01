"""Keep the latest forwards of single requests on the device, so that a profile by threshold can be computed from them.

A forward takes one row, which a kernel writes.

Letters: F forwards in the log, C columns of the log, S slots, K masks of the full block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

CAPACITY = 1024
"""Least number of forwards that are kept."""


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
    """Drafts that were right, or kept, along with all drafts before them."""
    ratios: list[float]
    """Probability of each draft up to the first that was not kept, divided by that of the most likely token: 1 for a
    right one; 0 for a wrong one if thresholds do not apply to drafts."""
    accepted_confidences: list[float]
    """Confidences of the tokens that the previous forward accepted at masks."""
    agreed: list[bool]
    """Whether each of these tokens is the most likely one, given all tokens before it, or each draft of `ratios` if
    thresholds apply to drafts. It ends where a token was drawn that is not the most likely one."""


class ForwardLog:
    """The forwards of one worker with `slots` requests at most."""

    def __init__(self, masks: int, slots: int, device: torch.device) -> None:
        self._masks = masks
        self.row_FC = torch.full((max(CAPACITY, slots), 6 * masks + 6), torch.nan, device=device)
        """A ring of forwards. Columns: confidences at the masks, those of the previous forward of the request, whether
        tokens that it accepted, or drafts, are the most likely ones, tokens at the masks, drafts, ratios of drafts, and
        the six numbers that `_read` names. Confidences at masks that were not read, ratios of drafts that were not
        judged, and judgements of drawn tokens, are NaN."""
        self.confidence_SK = torch.zeros(slots, masks, device=device)
        """Confidences at the masks in the last forward of the request in each slot."""
        self.accepted_S = torch.zeros(slots, dtype=torch.int32, device=device)
        """Tokens that this forward accepted."""
        self._next = 0

    def begin(self, slot: int) -> None:
        """Forget the last forward in a slot, which gets another request."""
        self.accepted_S[slot] = 0

    def reserve(self, requests: int) -> int:
        """Return the first row of the next step, whose rows follow it in the ring."""
        first = self._next
        self._next = (first + requests) % self.row_FC.shape[0]
        return first

    def drain(self) -> list[LoggedForward]:
        """Return the forwards since the last call, oldest first, after the steps in flight."""
        rows = self.row_FC.roll(-self._next, dims=0).cpu().tolist()
        self.row_FC.fill_(torch.nan)
        self._next = 0
        return list(self._read(rows))

    def _read(self, rows: list[list[float]]) -> Iterator[LoggedForward]:
        masks = self._masks
        for row in rows:
            threshold, token, drafts, right, accepted, samples = row[6 * masks :]
            if samples != 1:  # a part of a prompt, or an empty row
                continue
            confidences, before, agreed, at_masks, fed, ratios = (
                row[part * masks : (part + 1) * masks] for part in range(6)
            )
            num_drafts, num_accepted = int(drafts), int(accepted)
            read = _before_nan(confidences)
            yield LoggedForward(
                threshold=threshold,
                mask_confidences=read,
                tokens=[int(token), *map(int, at_masks[: len(read)])],
                drafts=[int(draft) for draft in fed[:num_drafts]],
                draft_confidences=before[num_accepted : num_accepted + num_drafts],
                right=int(right),
                ratios=_before_nan(ratios),
                accepted_confidences=before[:num_accepted],
                agreed=[agrees == 1 for agrees in _before_nan(agreed)],
            )


def _before_nan(values: list[float]) -> list[float]:
    return values[: next((index for index, value in enumerate(values) if value != value), None)]
