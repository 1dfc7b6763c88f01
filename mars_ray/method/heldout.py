"""The lookahead of a model on held-out rows, as exact mode would find it.

The measurement is teacher-forced: every block is a position that a decoder could have reached, so the figures are those
of a decoder whose earlier tokens are correct. A mask counts if its most likely token is the one that the clean stream
predicts at the same position, because exact mode accepts that token and no other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mars_ray.method.loss import training_logits
from mars_ray.method.streams import Streams

HeldoutMask = tuple[bool, int]
"""Whether a mask is right, and the number of masks before it in its block."""


@dataclass(frozen=True, slots=True)
class HeldoutLookahead:
    """Tokens that a forward yields in exact mode, and how often each mask of a block is right."""

    tokens_per_forward: float
    """1 + the mean number of masks that are right in a row from the start of a block."""
    by_offset: list[float]
    """Share of masks that are right, indexed by the number of masks before them in the block."""

    @classmethod
    def of(cls, masks: Sequence[HeldoutMask]) -> "HeldoutLookahead":
        """Count masks in order, of which those of a block follow each other with rising offsets from 0."""
        runs, unbroken = 0, False
        counts = [[0, 0] for _ in range(max(offset for _, offset in masks) + 1)]
        for right, offset in masks:
            unbroken = right and (unbroken or offset == 0)
            runs += unbroken
            counts[offset][0] += right
            counts[offset][1] += 1
        return cls(1 + runs / counts[0][1], [right / masks for right, masks in counts])


@torch.no_grad()  # inference mode would leave gathered weights that cannot be trained
def heldout_masks(network: PreTrainedModel, streams: Streams, *, block: int) -> list[HeldoutMask]:
    """Return which masks are right, from one forward; `block` is that of `streams`.

    A forward looks ahead at `block` - 1 masks, so the last mask of a whole block is left out.
    """
    slot_M = torch.cat([streams.noisy_slot_M, streams.clean_slot_M])
    token_M = training_logits(network, streams, slot_M).argmax(dim=-1)
    token_RS = torch.full_like(streams.tokens_RS, -1)
    token_RS.view(-1)[slot_M] = token_M
    right_RS = token_RS == token_RS.gather(1, streams.twin_RS)
    right_M = right_RS.flatten()[streams.noisy_slot_M].tolist()
    offset_M = _offsets(streams)
    return [(right, offset) for right, offset in zip(right_M, offset_M, strict=True) if offset < block - 1]


def _offsets(streams: Streams) -> list[int]:
    """Return the number of labelled masks before each labelled mask in its block."""
    width = streams.tokens_RS.shape[1]
    slot_M = streams.noisy_slot_M
    fields = (slot_M // width, streams.example_RS.flatten()[slot_M], streams.block_RS.flatten()[slot_M])
    blocks = list(zip(*(field_M.tolist() for field_M in fields), strict=True))
    offsets: list[int] = []
    for number, block in enumerate(blocks):
        offsets.append(offsets[-1] + 1 if number and block == blocks[number - 1] else 0)
    return offsets
