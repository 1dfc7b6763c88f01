"""Decide which tokens of a step to keep, count it and log it, in one launch with a program for each request.

A program has one warp, so that its loads from a slot come before its stores there.

Letters: R requests of a step, S slots, N rows of logits, P positions of a step, K masks of the full block, Q = 1 + 2 K
rows of the widest request, G thresholds that are counted, F forwards in the log, C columns of a table. In a kernel such
a name is the address of the tensor.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mars_ray.vllm.forward_log import ForwardLog
from mars_ray.vllm.lookahead_counters import LookaheadCounters
from mars_ray.vllm.runner.kernels.confidence import MostLikely
from mars_ray.vllm.runner.kernels.layout import NextDrafts, StepBatch, StepLayout
from mars_ray.vllm.step_rule import LEAST_LIKELY


class StepOutcome(NamedTuple):
    """Tokens that a step yields."""

    token_RQ: Tensor
    """Tokens of each request from column 0 on, int64; those from `num_sampled_R` on are meaningless."""
    num_sampled_R: Tensor
    """Tokens to keep: right drafts, the next token, and tokens accepted at masks. int32, 0 within a prompt. Drafts that
    the threshold keeps count as right."""
    num_rejected_R: Tensor
    """Positions whose keys are void: wrong drafts, masks and padding; int32."""


def take(
    batch: StepBatch,
    layout: StepLayout,
    sampled_N: Tensor,
    likely: MostLikely,
    drafts: NextDrafts,
    counters: LookaheadCounters,
    log: ForwardLog,
    *,
    lenient: bool,
) -> StepOutcome:
    """Return the outcome of a step at whose rows the sampler chose `sampled_N`, int64. Replace the drafts.

    `lenient` says that thresholds apply to drafts.
    """
    requests, masks, thresholds = batch.slot_R.shape[0], drafts.token_SK.shape[1], counters.threshold_G.shape[0]
    width = 1 + 2 * masks
    num_sampled_R, num_rejected_R = (layout.known_R.new_empty(requests) for _ in range(2))
    outcome = StepOutcome(sampled_N.new_empty(requests, width), num_sampled_R, num_rejected_R)
    _take[(requests,)](
        *batch,
        layout.known_R,
        layout.drafts_R,
        layout.masks_R,
        layout.threshold_R,
        sampled_N,
        *likely,
        *outcome,
        *drafts,
        counters.sum_SC,
        counters.passed_SGK,
        counters.threshold_G,
        log.row_FC,
        log.reserve(requests),
        log.confidence_SK,
        log.accepted_S,
        K=masks,
        Q=width,
        G=thresholds,
        F=log.row_FC.shape[0],
        K_BLOCK=triton.next_power_of_2(masks),
        Q_BLOCK=triton.next_power_of_2(width),
        G_BLOCK=triton.next_power_of_2(thresholds),
        LEAST_LIKELY=LEAST_LIKELY,
        LENIENT=lenient,
        num_warps=1,
    )
    return outcome


@triton.jit(do_not_specialize=["log_start"])
def _take(
    slot_R,
    query_start_R,
    row_start_R,
    input_ids_P,
    known_R,
    drafts_R,
    masks_R,
    threshold_R,
    sampled_N,
    likely_N,
    confidence_N,
    ratio_N,
    token_RQ,
    num_sampled_R,
    num_rejected_R,
    draft_SK,
    num_drafts_S,
    sum_SC,
    passed_SGK,
    grid_G,
    log_FC,
    log_start,
    confidence_SK,
    accepted_S,
    K: tl.constexpr,
    Q: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
    K_BLOCK: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
    LEAST_LIKELY: tl.constexpr,
    LENIENT: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slot_R + request)
    first = tl.load(row_start_R + request)
    rows = tl.load(row_start_R + request + 1) - first
    known = tl.load(known_R + request)
    drafts = tl.load(drafts_R + request)
    masks = tl.load(masks_R + request)
    threshold = tl.load(threshold_R + request)
    lowest = tl.where(threshold < 1, threshold, 2.0)  # no probability reaches 2, so threshold 1 keeps nothing
    fed_Q = input_ids_P + tl.load(query_start_R + request + 1) - rows
    samples = known <= rows  # the step reaches the end of the known tokens
    next_row = first + known - 1  # row of the token after the known ones
    index = tl.arange(0, K_BLOCK)

    is_draft = index < drafts
    draft = tl.load(fed_Q + known + index, mask=is_draft, other=0)
    is_chosen = is_draft & (draft == tl.load(sampled_N + next_row + index, mask=is_draft, other=0))
    of_wrong = 0.0
    if LENIENT:
        of_wrong = tl.load(ratio_N + next_row + index, mask=is_draft, other=0.0)
    ratio = tl.where(is_chosen, 1.0, of_wrong)
    is_right = is_chosen | ((ratio >= lowest) & (ratio > 0))
    right = _leading(is_right, index, 0, K_BLOCK)
    kept = right - tl.sum((is_chosen & (index < right)).to(tl.int32), axis=0)  # by lenience

    mask_row = next_row + drafts + 1 + index
    is_mask = index < tl.where(right == drafts, masks, 0)
    before = tl.load(sampled_N + mask_row - 1, mask=is_mask, other=0)
    follows_likely = is_mask & (before == tl.load(likely_N + mask_row - 1, mask=is_mask, other=0))
    is_read = index < _leading(follows_likely, index, 0, K_BLOCK)
    token = tl.load(sampled_N + mask_row, mask=is_read, other=0)
    confidence = tl.load(confidence_N + mask_row, mask=is_read, other=0.0)
    passes = is_read & (token == tl.load(likely_N + mask_row, mask=is_read, other=0))
    passes = passes & (confidence >= (2.0 if LENIENT else lowest))
    accepted = _leading(passes, index, 0, K_BLOCK)

    chance = tl.cumprod(tl.where(index < accepted, 1.0, confidence), axis=0)
    num_drafts = _leading(is_read & (chance >= LEAST_LIKELY), index, 0, K_BLOCK) - accepted
    is_kept = (index >= accepted) & (index < accepted + num_drafts)
    tl.store(draft_SK + slot * K + index - accepted, token, mask=is_kept)
    tl.store(num_drafts_S + slot, num_drafts)

    sampled = tl.where(samples, right + 1 + accepted, 0)
    tl.store(num_sampled_R + request, sampled)
    tl.store(num_rejected_R + request, tl.where(samples, rows - known - right, 0))
    column = tl.arange(0, Q_BLOCK)
    sampled_id = tl.load(sampled_N + next_row + column, mask=(column >= right) & (column < sampled), other=0)
    draft_id = tl.load(fed_Q + known + column, mask=column < right, other=0)
    tl.store(token_RQ + request * Q + column, tl.where(column < right, draft_id, sampled_id), mask=column < Q)

    _log(
        log_FC + (log_start + request) % F * (6 * K + 6),
        first, next_row, fed_Q, sampled_N, likely_N,
        index, is_read, confidence, token, draft, ratio, threshold, drafts, right, samples,
        confidence_SK + slot * K, accepted_S + slot,
        K, LENIENT,
    )  # fmt: skip
    tl.store(accepted_S + slot, accepted)
    if samples:
        _count(sum_SC + slot * 6, sampled, accepted + kept, drafts, right, rows)
        _count_passes(passed_SGK + slot * G * K, grid_G, index, is_read, confidence, K, G, K_BLOCK, G_BLOCK)


@triton.jit
def _leading(flag, index, axis: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of true values before the first false one."""
    return tl.min(tl.where(flag, BLOCK, index), axis=axis)


@triton.jit
def _count(sum_C, sampled, accepted, drafts, right, rows):
    """Add a forward to the sums of its slot, in the order of the fields of `LookaheadRecord`."""
    tl.store(sum_C, tl.load(sum_C) + 1)
    tl.store(sum_C + 1, tl.load(sum_C + 1) + sampled)
    tl.store(sum_C + 2, tl.load(sum_C + 2) + accepted)
    tl.store(sum_C + 3, tl.load(sum_C + 3) + drafts)
    tl.store(sum_C + 4, tl.load(sum_C + 4) + right)
    tl.store(sum_C + 5, tl.load(sum_C + 5) + rows)


@triton.jit
def _count_passes(
    passed_GK,
    grid_G,
    index,
    is_read,
    confidence,
    K: tl.constexpr,
    G: tl.constexpr,
    K_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
):
    """Count the masks that reach each threshold together with all masks before them."""
    row = tl.arange(0, G_BLOCK)
    grid = tl.load(grid_G + row, mask=row < G, other=2.0)
    reaches = is_read[None, :] & (confidence[None, :] >= grid[:, None])
    passes = index[None, :] < _leading(reaches, index[None, :], 1, K_BLOCK)[:, None]
    count_GK = passed_GK + row[:, None] * K + index[None, :]
    tl.store(count_GK, tl.load(count_GK, mask=passes, other=0) + 1, mask=passes)


@triton.jit
def _log(
    row_C,
    first,
    next_row,
    fed_Q,
    sampled_N,
    likely_N,
    index,
    is_read,
    confidence,
    token,
    draft,
    ratio,
    threshold,
    drafts,
    right,
    samples,
    confidence_K,
    accepted_1,
    K: tl.constexpr,
    LENIENT: tl.constexpr,
):
    """Write a row of the log, and keep the confidences for the row of the next step."""
    is_column = index < K
    nan = float("nan")
    read_confidence = tl.where(is_read, confidence, nan)
    previous_confidence = tl.load(confidence_K + index, mask=is_column)
    accepted = tl.load(accepted_1)
    is_verified = index < tl.where(samples, tl.minimum(drafts, right + 1), 0)
    if LENIENT:
        is_judged, row = is_verified, next_row
    else:
        is_judged, row = index < tl.where(samples, accepted, 0), first
    judged = tl.load(sampled_N + row + index, mask=is_judged, other=0)
    agrees = judged == tl.load(fed_Q + row - first + 1 + index, mask=is_judged, other=0)
    is_likely = is_judged & (judged == tl.load(likely_N + row + index, mask=is_judged, other=0))
    tl.store(row_C + index, read_confidence, mask=is_column)
    tl.store(row_C + K + index, previous_confidence, mask=is_column)
    tl.store(row_C + 2 * K + index, tl.where(is_likely, agrees.to(tl.float32), nan), mask=is_column)
    tl.store(row_C + 3 * K + index, token.to(tl.float32), mask=is_column)
    tl.store(row_C + 4 * K + index, draft.to(tl.float32), mask=is_column)
    tl.store(row_C + 5 * K + index, tl.where(is_verified, ratio, nan), mask=is_column)
    tl.store(row_C + 6 * K, threshold)
    tl.store(row_C + 6 * K + 1, tl.load(sampled_N + next_row + right, mask=samples, other=0).to(tl.float32))
    tl.store(row_C + 6 * K + 2, drafts.to(tl.float32))
    tl.store(row_C + 6 * K + 3, right.to(tl.float32))
    tl.store(row_C + 6 * K + 4, accepted.to(tl.float32))
    tl.store(row_C + 6 * K + 5, samples.to(tl.float32))
    tl.store(confidence_K + index, read_confidence, mask=is_column)
