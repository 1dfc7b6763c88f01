"""Decide which tokens of a step to keep: verify drafts, take the next token, accept tokens at masks, draft the rest.

The rule is that of `method/reference`. Predictions at masks are accepted while their confidence passes the threshold;
the first that falls short and those after it become drafts, which the next step verifies. One thing differs: vLLM's
attention is causal, so masks follow the last draft only, and a wrong draft voids the masks of its step.

Everything stays on the device: no value is read by the host.

Letters: R requests of a step, Q positions of the widest request, K masks of the full block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mars_ray.method.drafts import DRAFT_POSITIONS, FIXED_PRICE
from mars_ray.vllm.step_layout import StepLayout

LEAST_LIKELY = DRAFT_POSITIONS * FIXED_PRICE
"""Minimum probability that a draft is right along with all drafts before it, as in the reference decoder."""


class StepPredictions(NamedTuple):
    """Prediction at every row of logits; tensors [R, Q], padded after each request's rows."""

    token_RQ: Tensor
    """Token that the sampler chose, int64."""
    confidence_RQ: Tensor
    """Probability of the most likely token, float32."""
    is_argmax_RQ: Tensor
    """Whether the chosen token is the most likely one. Predictions at later masks assume that it is, so nothing is
    accepted or drafted after a token that a draw, a penalty or a bias changed. At a mask such a token is a draft."""


class StepOutcome(NamedTuple):
    """Tokens that a step yields, and the drafts for the next step."""

    token_RQ: Tensor
    """Tokens of each request from column 0 on, int64 [R, Q]; columns from `num_sampled_R` on are meaningless."""
    first_row_R: Tensor
    """Row of the prediction in column 0, int64 [R]."""
    num_sampled_R: Tensor
    """Tokens to keep: right drafts, the next token, and tokens accepted at masks. int64 [R], 0 within a prompt."""
    num_rejected_R: Tensor
    """Positions whose keys are void: wrong drafts, masks and padding; int64 [R]."""
    right_R: Tensor
    """Right drafts, int64 [R]."""
    accepted_R: Tensor
    """Tokens accepted at masks, int64 [R]."""
    drafts_RK: Tensor
    """Drafts for the next step, int64 [R, K]."""
    num_drafts_R: Tensor
    """Number of valid drafts in `drafts_RK`, int64 [R]."""
    mask_confidence_RK: Tensor
    """Confidence at each mask, float32 [R, K]; NaN where no mask was read."""


def take(layout: StepLayout, predictions: StepPredictions, fed_drafts_RK: Tensor, threshold_R: Tensor) -> StepOutcome:
    """Return the outcome of a step that fed `fed_drafts_RK` as drafts. A threshold of 1 accepts nothing at masks."""
    width, masks = predictions.token_RQ.shape[1], fed_drafts_RK.shape[1]
    column_1Q = torch.arange(width, device=threshold_R.device)[None]
    first_row_R = (layout.known_R - 1).clamp(0, width - 1)
    row_RQ = (first_row_R[:, None] + column_1Q).clamp(max=width - 1)
    token_RQ = predictions.token_RQ.gather(1, row_RQ)
    offset_1K = torch.arange(masks, device=threshold_R.device)[None]

    is_right_RK = (columns(token_RQ, offset_1K) == fed_drafts_RK) & (offset_1K < layout.drafts_R[:, None])
    right_R = _leading(is_right_RK)

    mask_RK = layout.drafts_R[:, None] + 1 + offset_1K  # columns of the predictions at masks
    is_read_RK = (offset_1K < layout.masks_R[:, None]) & (right_R == layout.drafts_R)[:, None]
    changed_RQ = ~predictions.is_argmax_RQ.gather(1, row_RQ)
    is_read_RK &= columns(changed_RQ, mask_RK - 1).long().cumsum(dim=1) == 0
    at_mask_changed_RK = columns(changed_RQ, mask_RK)
    confidence_RK = columns(predictions.confidence_RQ.gather(1, row_RQ), mask_RK)

    passes_RK = is_read_RK & ~at_mask_changed_RK & (confidence_RK >= threshold_R[:, None])
    accepted_R = _leading(passes_RK & (threshold_R < 1)[:, None])

    after_RK = offset_1K >= accepted_R[:, None]
    likely_RK = torch.where(after_RK, confidence_RK, 1.0).cumprod(dim=1)
    num_read_R = _leading(is_read_RK & ((likely_RK >= LEAST_LIKELY) | ~after_RK))
    num_drafts_R = (num_read_R - accepted_R).clamp(min=0)
    drafts_RK = columns(columns(token_RQ, mask_RK), accepted_R[:, None] + offset_1K)

    samples_R = layout.samples_R
    return StepOutcome(
        token_RQ=token_RQ,
        first_row_R=first_row_R,
        num_sampled_R=torch.where(samples_R, right_R + 1 + accepted_R, 0),
        num_rejected_R=torch.where(samples_R, layout.rows_R - layout.known_R - right_R, 0),
        right_R=torch.where(samples_R, right_R, 0),
        accepted_R=torch.where(samples_R, accepted_R, 0),
        drafts_RK=drafts_RK,
        num_drafts_R=torch.where(samples_R, num_drafts_R, 0),
        mask_confidence_RK=torch.where(is_read_RK & samples_R[:, None], confidence_RK, torch.nan),
    )


def columns(values_RQ: Tensor, index_RK: Tensor) -> Tensor:
    """Return the values at the given columns; columns beyond the last repeat the last."""
    index_RK = index_RK.clamp(max=values_RQ.shape[1] - 1).expand(values_RQ.shape[0], -1)
    return values_RQ.gather(1, index_RK)


def _leading(flag_RK: Tensor) -> Tensor:
    """Return the number of true values before the first false one in each row, int64 [R]."""
    return flag_RK.long().cumprod(dim=1).sum(dim=1)
