"""Find the most likely token of each row of logits and its probability, in one pass over the vocabulary, and compare
drafts with it.

A program reads one row, in its own precision, and adds in float32. Each of its lanes keeps the maximum of the tokens it
has read and the sum of their exponentials relative to this maximum (online softmax, arXiv 1805.02867).

Letters: R requests of a step, Q rows of the widest request, N rows of logits, V tokens of the vocabulary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mars_ray.vllm.runner.kernels.layout import StepBatch, StepLayout

TOKENS_AT_ONCE = 8192
"""Tokens of the vocabulary that a program reads at once."""


class MostLikely(NamedTuple):
    """The most likely token at each row. Rows that the rule does not read hold no value."""

    token_N: Tensor
    """Token id, int32; the lowest among equally likely ones."""
    confidence_N: Tensor
    """Probability, float32."""
    ratio_N: Tensor
    """Probability of the draft that the next position is fed, divided by that of the most likely token, at the
    temperature of the request; float32. Rows before other positions hold no value."""


def find_most_likely(logits_NV: Tensor, batch: StepBatch, layout: StepLayout, width: int) -> MostLikely:
    """Return the most likely tokens; requests have up to `width` rows. A token with a logit of -inf has no chance."""
    rows, vocab_size = logits_NV.shape
    dtypes = (torch.int32, torch.float32, torch.float32)
    likely = MostLikely(*(logits_NV.new_empty(rows, dtype=dtype) for dtype in dtypes))
    _find_most_likely[(batch.slot_R.shape[0], width)](
        logits_NV,
        logits_NV.stride(0),
        batch.query_start_R,
        batch.row_start_R,
        batch.input_ids_P,
        layout.known_R,
        layout.drafts_R,
        layout.masks_R,
        layout.temperature_R,
        *likely,
        vocab_size,
        V_BLOCK=min(TOKENS_AT_ONCE, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )
    return likely


@triton.jit
def _find_most_likely(
    logits_NV,
    logits_stride,
    query_start_R,
    row_start_R,
    input_ids_P,
    known_R,
    drafts_R,
    masks_R,
    temperature_R,
    token_N,
    confidence_N,
    ratio_N,
    vocab_size,
    V_BLOCK: tl.constexpr,
):
    request, column = tl.program_id(0), tl.program_id(1)
    first = tl.load(row_start_R + request)
    rows = tl.load(row_start_R + request + 1) - first
    known = tl.load(known_R + request)
    drafts = tl.load(drafts_R + request)
    read = known + drafts + tl.load(masks_R + request)
    # Nothing is judged, accepted or drafted after the masks, within a prompt, or at a single known token.
    if (column < read) & (read > 1) & (read <= rows):
        row = logits_NV + (first + column).to(tl.int64) * logits_stride
        lane = tl.arange(0, V_BLOCK)
        best = tl.full([V_BLOCK], -3.0e38, tl.float32)
        token = tl.zeros([V_BLOCK], tl.int32)
        total = tl.zeros([V_BLOCK], tl.float32)
        for start in range(0, vocab_size, V_BLOCK):
            index = start + lane
            logit = tl.load(row + index, mask=index < vocab_size, other=-float("inf")).to(tl.float32)
            is_better = logit > best
            smaller = tl.exp(-tl.abs(logit - best))  # the lesser of the two exponentials, relative to the greater
            total = tl.where(is_better, total * smaller + 1.0, total + smaller)
            token = tl.where(is_better, index, token)
            best = tl.where(is_better, logit, best)
        highest = tl.max(best, axis=0)
        tl.store(token_N + first + column, tl.min(tl.where(best == highest, token, vocab_size), axis=0))
        tl.store(confidence_N + first + column, 1.0 / tl.sum(total * tl.exp(best - highest), axis=0))
        is_before_draft = (column >= known - 1) & (column < known - 1 + drafts)
        next_id = input_ids_P + tl.load(query_start_R + request + 1) - rows + column + 1
        draft = tl.load(next_id, mask=is_before_draft, other=0)
        below = tl.load(row + draft, mask=is_before_draft, other=0.0).to(tl.float32) - highest
        tl.store(ratio_N + first + column, tl.exp(below / tl.load(temperature_R + request)), mask=is_before_draft)
