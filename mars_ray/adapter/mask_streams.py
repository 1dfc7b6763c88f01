"""Build the training streams of an adapter: masks, and the clean tokens that the base reads.

A mask sees only the clean tokens before its block and the masks of its block, as in the engine. There are two
differences from `method.streams`: a new block begins at each response, and the noisy stream holds only masks whose next
token belongs to the response.
"""

from torch import Tensor, cat

from mars_ray.method.streams import (
    IGNORE,
    PADDING,
    PackedRows,
    Streams,
    block_starts,
    chosen_slots,
    clean_stream,
    masks_before,
)


def mask_streams(
    rows: PackedRows, *, masks: int, phase_RT: Tensor | int = 0, decay: float = 1.0, multiple_of: int = 1
) -> Streams:
    """Build the streams `[masks | clean]`, with at most `masks` masks in a block.

    At a mask, `tokens_RS` holds the number of masks before it in its block. The label of a mask is the next token. Its
    twin, the clean token at the same position, has the same label; other clean tokens have no label.

    Padding rounds N up to a multiple of `multiple_of`, but at most to T, so that a GPU meets few shapes.
    """
    clean = clean_stream(rows)
    starts_RT = block_starts(rows, (rows.position_RT + phase_RT) // masks)
    starts_RT[:, 1:] |= rows.response_RT[:, 1:] & ~rows.response_RT[:, :-1]
    block_RT = starts_RT.long().cumsum(dim=1)
    offset_RT = masks_before(rows, block_RT)
    masked_RT = rows.response_RT & (clean.label_RS != IGNORE)
    slot_RN, filling_RN = chosen_slots(masked_RT, multiple_of)
    label_RT = clean.label_RS.masked_fill(~masked_RT, IGNORE)

    def both(noisy_RT: Tensor, clean_RT: Tensor, filling: int) -> Tensor:
        return cat([noisy_RT.gather(1, slot_RN).masked_fill(filling_RN, filling), clean_RT], dim=1)

    return Streams.of(
        noisy=slot_RN.shape[1],
        tokens_RS=both(offset_RT.long(), rows.tokens_RT, 0),
        position_RS=both(rows.position_RT, rows.position_RT, 0),
        example_RS=both(rows.example_RT, rows.example_RT, PADDING),
        block_RS=both(block_RT, block_RT, 0),
        label_RS=both(label_RT, label_RT, IGNORE),
        twin_RS=cat([slot_RN, clean.twin_RS], dim=1) + slot_RN.shape[1],
        weight_RS=both(decay**offset_RT, clean.weight_RS, 0),
    )
