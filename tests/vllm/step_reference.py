"""The rule of a step in plain torch, as the kernels of the plug-in compute it. See `mars_ray.vllm.step_rule`.

Letters: R requests of a step, S slots, Q positions of the widest request, K masks of the full block, G thresholds.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mars_ray.vllm.forward_log import ForwardLog
from mars_ray.vllm.lookahead_counters import LookaheadCounters
from mars_ray.vllm.step_rule import LEAST_LIKELY


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


def thresholds(
    *, own_R: Tensor, class_R: Tensor, floor_R: Tensor, total_R: Tensor, last_total: int, is_exact: bool
) -> Tensor:
    """Return the threshold of each request in a step: its own or, if that is negative, that of its class."""
    threshold_R = torch.where(own_R < 0, class_R.maximum(floor_R), own_R)
    return torch.where((total_R > last_total) | is_exact, 1.0, threshold_R)


class StepPredictions(NamedTuple):
    """Prediction at every row of logits; tensors [R, Q], padded after each request's rows."""

    token_RQ: Tensor
    """Token that the sampler chose, int64."""
    confidence_RQ: Tensor
    """Probability of the most likely token, float32."""
    is_argmax_RQ: Tensor
    """Whether the chosen token is the most likely one. Predictions at later masks assume that it is, so nothing is
    accepted or drafted after a token that a draw, a penalty or a bias changed. At a mask such a token is a draft."""
    ratio_RQ: Tensor
    """Probability of the id that the next row is fed, divided by that of the most likely token, float32."""


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
    """Right drafts and those that the threshold keeps, int64 [R]."""
    kept_R: Tensor
    """Drafts that the threshold keeps in place of the sampler's token, int64 [R]."""
    ratio_RK: Tensor
    """Ratio of each draft up to the first that is not kept, float32 [R, K]; NaN elsewhere."""
    accepted_R: Tensor
    """Tokens accepted at masks, int64 [R]."""
    drafts_RK: Tensor
    """Drafts for the next step, int64 [R, K]."""
    num_drafts_R: Tensor
    """Number of valid drafts in `drafts_RK`, int64 [R]."""
    mask_confidence_RK: Tensor
    """Confidence at each mask, float32 [R, K]; NaN where no mask was read."""


def take(
    layout: StepLayout,
    predictions: StepPredictions,
    fed_drafts_RK: Tensor,
    threshold_R: Tensor,
    *,
    lenient: bool = False,
) -> StepOutcome:
    """Return the outcome of a step that fed `fed_drafts_RK` as drafts. A threshold of 1 accepts nothing at masks.

    `lenient` says that thresholds apply to drafts.
    """
    width, masks = predictions.token_RQ.shape[1], fed_drafts_RK.shape[1]
    column_1Q = torch.arange(width, device=threshold_R.device)[None]
    first_row_R = (layout.known_R - 1).clamp(0, width - 1)
    row_RQ = (first_row_R[:, None] + column_1Q).clamp(max=width - 1)
    token_RQ = predictions.token_RQ.gather(1, row_RQ)
    offset_1K = torch.arange(masks, device=threshold_R.device)[None]

    is_draft_RK = offset_1K < layout.drafts_R[:, None]
    is_chosen_RK = is_draft_RK & (columns(token_RQ, offset_1K) == fed_drafts_RK)
    ratio_RK = (
        columns(predictions.ratio_RQ.gather(1, row_RQ), offset_1K) if lenient else torch.zeros(fed_drafts_RK.shape)
    )
    ratio_RK = torch.where(is_chosen_RK, 1.0, ratio_RK)
    keeps_RK = (ratio_RK >= threshold_R[:, None]) & (ratio_RK > 0) & (threshold_R < 1)[:, None]
    right_R = _leading(is_chosen_RK | (is_draft_RK & keeps_RK & lenient))
    is_verified_RK = is_draft_RK & (offset_1K <= right_R[:, None]) & layout.samples_R[:, None]

    mask_RK = layout.drafts_R[:, None] + 1 + offset_1K  # columns of the predictions at masks
    is_read_RK = (offset_1K < layout.masks_R[:, None]) & (right_R == layout.drafts_R)[:, None]
    changed_RQ = ~predictions.is_argmax_RQ.gather(1, row_RQ)
    is_read_RK &= columns(changed_RQ, mask_RK - 1).long().cumsum(dim=1) == 0
    at_mask_changed_RK = columns(changed_RQ, mask_RK)
    confidence_RK = columns(predictions.confidence_RQ.gather(1, row_RQ), mask_RK)

    passes_RK = is_read_RK & ~at_mask_changed_RK & (confidence_RK >= threshold_R[:, None])
    accepted_R = _leading(passes_RK & (threshold_R < 1)[:, None] & (not lenient))

    after_RK = offset_1K >= accepted_R[:, None]
    likely_RK = torch.where(after_RK, confidence_RK, 1.0).cumprod(dim=1)
    num_read_R = _leading(is_read_RK & ((likely_RK >= LEAST_LIKELY) | ~after_RK))
    num_drafts_R = (num_read_R - accepted_R).clamp(min=0)
    drafts_RK = columns(columns(token_RQ, mask_RK), accepted_R[:, None] + offset_1K)

    samples_R = layout.samples_R
    is_right_RQ = column_1Q < right_R[:, None]
    return StepOutcome(
        token_RQ=torch.where(is_right_RQ, columns(fed_drafts_RK, column_1Q), token_RQ),
        first_row_R=first_row_R,
        num_sampled_R=torch.where(samples_R, right_R + 1 + accepted_R, 0),
        num_rejected_R=torch.where(samples_R, layout.rows_R - layout.known_R - right_R, 0),
        right_R=torch.where(samples_R, right_R, 0),
        kept_R=torch.where(samples_R, right_R - (is_chosen_RK & (offset_1K < right_R[:, None])).sum(dim=1), 0),
        ratio_RK=torch.where(is_verified_RK, ratio_RK, torch.nan),
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


def add_to_log(
    log: ForwardLog,
    slot_R: Tensor,
    layout: StepLayout,
    fed_RQ: Tensor,
    threshold_R: Tensor,
    predictions: StepPredictions,
    outcome: StepOutcome,
    *,
    lenient: bool = False,
) -> None:
    """Add a step that fed `fed_RQ`."""
    width, masks = fed_RQ.shape[1], log.confidence_SK.shape[1]
    column_1K = torch.arange(masks)[None]
    accepted_R = log.accepted_S[slot_R]
    agrees_RQ = predictions.token_RQ == fed_RQ.roll(-1, dims=1)
    judged_RQ = torch.where(predictions.is_argmax_RQ, agrees_RQ.float(), torch.nan)
    first_draft_R = layout.known_R.clamp(0, width - 1)
    first_judged_R = outcome.first_row_R if lenient else torch.zeros_like(first_draft_R)
    is_judged_RK = ~outcome.ratio_RK.isnan() if lenient else column_1K < accepted_R[:, None]
    is_judged_RK &= layout.samples_R[:, None]
    judged_RK = columns(judged_RQ, first_judged_R[:, None] + column_1K)
    mask_R = layout.drafts_R + 1  # column of the first prediction at a mask, among those that choose tokens
    numbers = (
        threshold_R,
        outcome.token_RQ.gather(1, outcome.right_R[:, None])[:, 0],
        layout.drafts_R,
        outcome.right_R,
        accepted_R,
        layout.samples_R,
    )
    parts = (
        outcome.mask_confidence_RK,
        log.confidence_SK[slot_R],
        torch.where(is_judged_RK, judged_RK, torch.nan),
        columns(outcome.token_RQ, mask_R[:, None] + column_1K).float(),
        columns(fed_RQ, first_draft_R[:, None] + column_1K).float(),
        outcome.ratio_RK,
        torch.stack([number_R.float() for number_R in numbers], dim=1),
    )
    row_R = (log.reserve(len(slot_R)) + torch.arange(len(slot_R))) % len(log.row_FC)
    log.row_FC[row_R] = torch.cat(parts, dim=1)
    log.confidence_SK[slot_R] = outcome.mask_confidence_RK
    log.accepted_S[slot_R] = outcome.accepted_R.int()


def count(counters: LookaheadCounters, slot_R: Tensor, layout: StepLayout, outcome: StepOutcome) -> None:
    """Count a step."""
    samples_R = layout.samples_R
    accepted_R = outcome.accepted_R + outcome.kept_R
    numbers = (samples_R, outcome.num_sampled_R, accepted_R, layout.drafts_R, outcome.right_R, layout.rows_R)
    counters.sum_SC[slot_R] += torch.stack([number_R.where(samples_R, 0) for number_R in numbers], dim=1)
    passes_RGK = outcome.mask_confidence_RK[:, None] >= counters.threshold_G[:, None]
    counters.passed_SGK[slot_R] += passes_RGK.long().cumprod(dim=2)
