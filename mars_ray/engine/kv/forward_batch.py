"""The index tensors of one forward, which runners, attention and kernels take as one value.

Letters: N packed positions, M picked positions, R active slots, P positions of the widest decoding one, L slots that
read a prompt, Q positions of the longest part of a prompt, C columns of the cache.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PrefillBatch:
    """The second rectangle of attention: slots whose prompts would stretch the first."""

    where_LQ: Tensor
    """The packed position in each cell; fillers name any."""
    slot_L: Tensor
    column_C: Tensor
    """Columns of the cache that the rectangle reads."""


@dataclass(slots=True)
class ForwardBatch:
    """The inputs of one forward."""

    id_N: Tensor
    """Token ids."""
    slot_N: Tensor
    """Slot of the cache that each position belongs to."""
    position_N: Tensor
    """Position in its sequence."""
    target_N: Tensor
    """Column of the slot that keys and values are written to: `position_N`, except with several rows of masks."""
    prefix_N: Tensor
    """Number of leading columns of the slot that a position attends to."""
    behind_N: Tensor
    """Further columns it attends to, a bit for each of the 63 after the prefix: the masks before it in its row."""
    offset_N: Tensor
    """Number of masks before a mask in its row; -1 for tokens and drafts."""
    adapter_N: Tensor
    """Adapter that decodes a mask; -1 for tokens and drafts, and for masks that the base decodes."""
    back_N: Tensor
    """Cell of each position in the rectangles of attention."""
    pick_M: Tensor
    """Positions whose logits are read."""
    where_RP: Tensor
    """The packed position in each cell of the first rectangle; fillers name any."""
    column_C: Tensor
    """Columns of the cache that the first rectangle reads."""
    prefill: PrefillBatch | None
    kv_tokens: int
    """Tokens of all sequences that were in the cache before this forward. The tokens of this forward count as positions
    only; otherwise a fit of step times could not separate the two costs."""
