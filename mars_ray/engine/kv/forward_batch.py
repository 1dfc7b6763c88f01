"""The index tensors of one forward, passed as one value to runners, attention and kernels.

Attention computes the slots as one or two padded rectangles. Letters of dimensions: N packed positions, M picked
positions, R active slots, P positions of the widest slot in the first rectangle, L slots in the second rectangle, Q
positions of the widest of them, C columns of the cache.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PrefillBatch:
    """The second rectangle of attention: slots with prompts that would make the first rectangle much wider."""

    where_LQ: Tensor
    """The packed position in each cell; filler cells hold an arbitrary position."""
    slot_L: Tensor
    """Slot of the cache for each row."""
    column_C: Tensor
    """Columns of the cache that the rectangle reads."""


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
    back_N: Tensor
    """Cell of each position in the rectangles, counting the cells of the first and then those of the second."""
    pick_M: Tensor
    """Packed positions whose logits are read."""
    where_RP: Tensor
    """The packed position in each cell of the first rectangle; filler cells hold an arbitrary position."""
    column_C: Tensor
    """Columns of the cache that the first rectangle reads."""
    prefill: PrefillBatch | None
    kv_tokens: int
    """Number of tokens of all sequences in the cache before this forward. Tokens of this forward are not included,
    because a fit of step times could not separate their cost from the cost of positions."""
