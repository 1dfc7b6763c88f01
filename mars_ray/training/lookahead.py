"""Measure the lookahead of a model during training, with one forward over held-out rows.

The measurement is teacher-forced: every block of the noisy stream is a position that a decoder could have reached, so
the figures are those of a decoder whose earlier tokens are all correct.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mars_ray.method.acceptance import confidence
from mars_ray.method.loss import training_logits
from mars_ray.method.metric import Metric
from mars_ray.method.streams import IGNORE, Streams


@dataclass(frozen=True, slots=True)
class HeldoutLookahead:
    """Lookahead of a model at one threshold, on held-out rows."""

    tokens_per_forward: float
    """1 + the mean number of masks accepted in a row, which is at most block - 1."""
    agreement: float | None
    """Share of the accepted tokens that equal the clean stream's prediction; None if no token was accepted."""


@torch.no_grad()  # inference mode would leave gathered weights that cannot be trained
def look_ahead(network: PreTrainedModel, streams: Streams, *, block: int, threshold: float) -> HeldoutLookahead:
    """Measure how many masks in a row have a probability of at least `threshold`; `block` is the block size of
    `streams`."""
    labelled_RS = streams.label_RS != IGNORE
    logits_MV = training_logits(network, streams, labelled_RS)
    token_M = logits_MV.argmax(dim=-1).tolist()
    confidence_M = confidence(logits_MV, Metric.PROBABILITY).tolist()
    row_M, slot_M = (index.tolist() for index in labelled_RS.nonzero(as_tuple=True))
    clean_token: dict[tuple[int, int, int], int] = {}
    masks: dict[tuple[int, int, int], list[tuple[int, int, float]]] = defaultdict(list)
    fields = (streams.example_RS, streams.block_RS, streams.position_RS, streams.noisy_RS)
    for row, slot, token, certainty in zip(row_M, slot_M, token_M, confidence_M, strict=True):
        example, block_number, position, noisy = (int(field[row, slot]) for field in fields)
        if noisy:
            masks[row, example, block_number].append((position, token, certainty))
        else:
            clean_token[row, example, position] = token
    accepted = agreeing = 0
    for (row, example, _), drafts in masks.items():
        for position, token, certainty in drafts[: block - 1]:
            if certainty < threshold:
                break
            accepted += 1
            agreeing += token == clean_token[row, example, position]
    return HeldoutLookahead(1 + accepted / len(masks), agreeing / accepted if accepted else None)
