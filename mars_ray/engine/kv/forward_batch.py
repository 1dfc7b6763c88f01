"""The index tensors of one forward, passed as one value to runners, attention and kernels.

The positions of all sequences are packed end to end. Letters of dimensions: N packed positions, M picked positions.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class SlotSpan(NamedTuple):
    """Consecutive packed positions of one sequence. They follow those of the span before them."""

    slot: int
    positions: int
    """Number of positions."""
    columns: int
    """Number of columns of the slot that the positions fill or read."""


@dataclass(slots=True)
class ForwardBatch:
    """The inputs of one forward."""

    id_N: Tensor
    """Token ids."""
    slot_N: Tensor
    """Cache slot of each position."""
    position_N: Tensor
    """Position in the sequence, for the rotary embedding."""
    target_N: Tensor
    """Column of the slot to which keys and values are written. It equals `position_N`, except with several rows of
    masks."""
    prefix_N: Tensor
    """Number of leading columns of the slot that the position attends to."""
    behind_N: Tensor
    """Bit set of further columns that the position attends to; bit i, at most 62, is column `prefix_N` + i. With
    several rows of masks, a mask attends in this way to its own row, up to itself."""
    offset_N: Tensor
    """Number of masks before a mask in its row; -1 for tokens and drafts."""
    adapter_N: Tensor
    """Number of the adapter that decodes a mask; -1 for tokens, drafts, and masks that the base model decodes."""
    pick_M: Tensor
    """Packed positions whose logits are read."""
    spans: list[SlotSpan]
    """The positions of each sequence; masks that an adapter decodes have a span of their own."""
    kv_tokens: int
    """Number of tokens of all sequences in the cache before this forward. Tokens of this forward are not included,
    because a fit of step times could not separate their cost from the cost of positions."""
