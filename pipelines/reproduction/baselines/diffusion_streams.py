"""Build the two streams of a training forward of block diffusion, and their attention mask.

The streams are `[noisy | clean]` along the sequence, with labels and weights.

Letters: R rows, T clean positions, C noisy blocks, B block size, N = C * B noisy slots, S = N + T.

Source: arXiv 2503.09573. As in decoding, position t of an example is in block t // B. Within an example:

    a noisy slot sees its noisy block, in both directions, and the clean tokens of earlier blocks;
    a clean slot sees the clean tokens of its block, in both directions, and of earlier blocks, so that its keys and
    values equal the decoder's cache of a finished block.

Attention inside a block would reveal the end of an answer if its last block ended there. A noisy block is therefore
always complete: slots after the response, whatever follows it, hold the stop token and are masked and learned like the
response. (A second response that begins in such a block is learned from its next block on.)

As in the autoregressive network that training starts from, a slot predicts the next token. The first token of a noisy
block is therefore predicted by the last clean slot before the block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mars_ray.method.streams import IGNORE, PADDING, PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionStreams:
    """Inputs of one training forward. Every tensor is [R, S], with the N noisy slots first."""

    tokens_RS: Tensor
    position_RS: Tensor
    """int64, the same for a token and for the mask that replaces it."""
    example_RS: Tensor
    """int64, number of the example in the row, `PADDING` for filling."""
    block_RS: Tensor
    """int64, number of the block in the example."""
    noisy_RS: Tensor
    """bool, True in the noisy stream."""
    response_RS: Tensor
    """bool, True for noisy slots of responses, masked or not."""
    label_RS: Tensor
    """int64, the next token if it is masked in the noisy stream, otherwise `IGNORE`."""
    weight_RS: Tensor
    """float32, weight of the loss at the label: 1 / (share of masks drawn for its block), the linear schedule."""

    def to(self, device: torch.device | str) -> "DiffusionStreams":
        """Return the same streams on `device`."""
        return DiffusionStreams(**{name: getattr(self, name).to(device) for name in self.__slots__})


def diffusion_streams(
    rows: PackedRows, *, block: int, mask_id: int, stop_id: int, generator: torch.Generator
) -> DiffusionStreams:
    """Draw a share of masks for each block with a response token, and mask this share of its response.

    The share is uniform in 0..1, but at least 1 / `block`, which bounds the weight. Each block has at least one mask.
    """
    R, T = rows.tokens_RT.shape
    start_RC, filling_RC = _starts(rows, block)
    slot_RCB = start_RC[:, :, None] + torch.arange(block)
    within_RCB = slot_RCB < T

    def at_slots(field_RT: Tensor) -> Tensor:
        return field_RT.gather(1, slot_RCB.clamp(max=T - 1).flatten(1)).view_as(slot_RCB)

    example_RC = rows.example_RT.gather(1, start_RC)
    own_RCB = within_RCB & (at_slots(rows.example_RT) == example_RC[:, :, None])
    of_response_RCB = own_RCB & at_slots(rows.response_RT)
    # The response lasts from the first response token of a block to the next other token; stop tokens follow.
    begun_RCB = of_response_RCB.long().cumsum(dim=2) > 0
    behind_RCB = (begun_RCB & ~of_response_RCB).long().cumsum(dim=2) > 0
    response_RCB = begun_RCB & ~filling_RC[:, :, None]
    token_RCB = at_slots(rows.tokens_RT).masked_fill(behind_RCB, stop_id)

    share_RC1 = torch.rand(*start_RC.shape, 1, generator=generator).clamp(min=1 / block)
    draw_RCB = torch.rand(slot_RCB.shape, generator=generator).masked_fill(~response_RCB, 2.0)
    # The lowest draw is always masked.
    masked_RCB = response_RCB & ((draw_RCB < share_RC1) | (draw_RCB == draw_RCB.amin(dim=2, keepdim=True)))

    def both(noisy_RCB: Tensor, clean_RT: Tensor, padding: int) -> Tensor:
        return torch.cat([noisy_RCB.masked_fill(filling_RC[:, :, None], padding).flatten(1), clean_RT], dim=1)

    # The previous slot: in the same block, or for the first slot of a block the clean token before the block.
    N = slot_RCB[0].numel()
    before_RCB = torch.arange(N).view_as(slot_RCB[0]).repeat(R, 1, 1) - 1
    before_RCB[:, :, 0] = N + start_RC - 1
    position_RCB = rows.position_RT.gather(1, start_RC)[:, :, None] + torch.arange(block)
    labelled_RCB = masked_RCB & (position_RCB > 0)

    def behind(field_RCB: Tensor, nothing: float) -> Tensor:
        field_RS = torch.full((R, N + T), nothing, dtype=field_RCB.dtype)
        row_M = labelled_RCB.nonzero()[:, 0]
        return field_RS.index_put_((row_M, before_RCB[labelled_RCB]), field_RCB[labelled_RCB])

    nowhere_RT = torch.zeros_like(rows.response_RT)
    return DiffusionStreams(
        tokens_RS=both(token_RCB.masked_fill(masked_RCB, mask_id), rows.tokens_RT, mask_id),
        position_RS=both(position_RCB, rows.position_RT, 0),
        example_RS=both(example_RC[:, :, None].expand_as(slot_RCB), rows.example_RT, PADDING),
        block_RS=both(position_RCB // block, rows.position_RT // block, 0),
        noisy_RS=torch.cat([torch.ones_like(response_RCB).flatten(1), nowhere_RT], dim=1),
        response_RS=torch.cat([response_RCB.flatten(1), nowhere_RT], dim=1),
        label_RS=behind(token_RCB, IGNORE),
        weight_RS=behind((1 / share_RC1).expand(slot_RCB.shape), 0.0),
    )


def _starts(rows: PackedRows, block: int) -> tuple[Tensor, Tensor]:
    """Return the first slots of blocks with response tokens, int64 [R, C], and which of them are filling, [R, C]."""
    R, T = rows.tokens_RT.shape
    start_RT = torch.arange(T) - rows.position_RT % block
    starts_RT = torch.zeros(R, T, dtype=torch.bool)
    row_M = rows.response_RT.nonzero()[:, 0]
    starts_RT[row_M, start_RT[rows.response_RT]] = True
    C = int(starts_RT.sum(dim=1).max())
    start_RC = torch.argsort((~starts_RT).to(torch.uint8), dim=1, stable=True)[:, :C]
    return start_RC, ~starts_RT.gather(1, start_RC)


def diffusion_mask(streams: DiffusionStreams) -> Tensor:
    """Return the mask for SDPA, bool [R, 1, S, S], True where attention is allowed; filling sees only filling."""

    def query(field_RS: Tensor) -> Tensor:
        return field_RS[:, None, :, None]

    def key(field_RS: Tensor) -> Tensor:
        return field_RS[:, None, None, :]

    same_block = query(streams.block_RS) == key(streams.block_RS)
    earlier_block = key(streams.block_RS) < query(streams.block_RS)
    of_own_stream = same_block & (query(streams.noisy_RS) == key(streams.noisy_RS))
    return (query(streams.example_RS) == key(streams.example_RS)) & (
        of_own_stream | (earlier_block & ~key(streams.noisy_RS))
    )
