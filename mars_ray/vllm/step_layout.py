"""Lay out the positions that a request gets in one step: known tokens, then drafts, then masks.

vLLM's scheduler gives every request of a step the same kind of row: one token and some draft positions. It believes
that only the newest token lacks keys in the KV cache. Tokens accepted at masks lack keys as well, because their
positions were fed masks, so the next step feeds them again. These are the known tokens. A step therefore feeds

    [ 1 + (tokens accepted at masks) known tokens | drafts to verify | masks | padding ]

With 2 K draft positions, the known tokens and the drafts, at most 1 + K together, leave room for K masks.

Letters: R requests of a step, Q positions of the widest request, K masks of the full block.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class StepLayout(NamedTuple):
    """Numbers of positions in each request's rows of logits. All tensors are int64 [R]."""

    rows_R: Tensor
    """Rows of logits: 1 for a part of a prompt, otherwise all positions of the request."""
    known_R: Tensor
    """Known tokens among the rows. More than `rows_R` if the prompt continues in a later step."""
    drafts_R: Tensor
    """Drafts after the known tokens."""
    masks_R: Tensor
    """Masks after the drafts."""

    @property
    def samples_R(self) -> Tensor:
        """Whether the step reaches the end of the request's known tokens, so that it yields a token; bool [R]."""
        return self.known_R <= self.rows_R


def draft_positions(block: int) -> int:
    """Return the number of draft positions that a request with this block needs per step."""
    return 2 * (block - 1)


def lay_out(*, positions_R: Tensor, rows_R: Tensor, unfed_R: Tensor, drafts_R: Tensor, masks_R: Tensor) -> StepLayout:
    """Return the layout of a step.

    `positions_R` counts the positions of each request, of which the last `rows_R` have logits. `unfed_R` counts the
    tokens that are known but lack keys in the cache. `drafts_R` and `masks_R` are the drafts and masks that each
    request wants.
    """
    known_R = unfed_R - (positions_R - rows_R)
    drafts_R = torch.minimum(drafts_R, (rows_R - known_R).clamp(min=0))
    masks_R = torch.minimum(masks_R, (rows_R - known_R - drafts_R).clamp(min=0))
    return StepLayout(rows_R, known_R, drafts_R, masks_R)


def fed_ids(layout: StepLayout, known_RQ: Tensor, drafts_RK: Tensor, mask_id_K: Tensor) -> Tensor:
    """Return the token ids to feed at every row as a tensor [R, Q]; rows after the masks get the last mask's id.

    `mask_id_K` holds the ids of a request's first, second and further masks.
    """
    column_1Q = torch.arange(known_RQ.shape[1], device=known_RQ.device)[None]
    draft_RQ = column_1Q - layout.known_R[:, None]
    mask_RQ = draft_RQ - layout.drafts_R[:, None]
    ids_RQ = torch.where(draft_RQ < 0, known_RQ, mask_id_K[mask_RQ.clamp(0, mask_id_K.shape[0] - 1)])
    is_draft_RQ = (draft_RQ >= 0) & (mask_RQ < 0)
    return torch.where(is_draft_RQ, drafts_RK.gather(1, draft_RQ.clamp(0, drafts_RK.shape[1] - 1)), ids_RQ)
