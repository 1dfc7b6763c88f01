"""Find the most likely token of each row of logits and its probability, in one pass over the vocabulary.

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


def find_most_likely(logits_NV: Tensor, batch: StepBatch, layout: StepLayout, width: int) -> MostLikely:
    """Return the most likely tokens; requests have up to `width` rows. A token with a logit of -inf has no chance."""
    rows, vocab_size = logits_NV.shape
    likely = MostLikely(logits_NV.new_empty(rows, dtype=torch.int32), logits_NV.new_empty(rows, dtype=torch.float32))
    _find_most_likely[(batch.slot_R.shape[0], width)](
        logits_NV,
        logits_NV.stride(0),
        batch.row_start_R,
        layout.known_R,
        layout.drafts_R,
        layout.masks_R,
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
    row_start_R,
    known_R,
    drafts_R,
    masks_R,
    token_N,
    confidence_N,
    vocab_size,
    V_BLOCK: tl.constexpr,
):
    request, column = tl.program_id(0), tl.program_id(1)
    first = tl.load(row_start_R + request)
    rows = tl.load(row_start_R + request + 1) - first
    read = tl.load(known_R + request) + tl.load(drafts_R + request) + tl.load(masks_R + request)
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
