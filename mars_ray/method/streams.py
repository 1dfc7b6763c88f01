"""Build the two streams of one MARS training forward from packed examples.

The streams lie next to each other as `[noisy | clean]` along the sequence, with the fields that the attention mask and
the loss need for each slot. `visibility` decides which slots may attend to which.

Letters: R rows, T clean positions, N noisy positions, S = N + T slots.

Source: arXiv 2604.07023, section 3. There are three differences. The noisy stream leaves out blocks without a response
token, because they have no mask and no other slot sees them. Blocks may begin at a random phase in each example, so
that the model is trained for blocks that begin anywhere. Masks further ahead in a block may have lower weights.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100
"""Label of a slot that is not trained on; `torch.nn.functional.cross_entropy` skips it."""

PADDING = -1
"""Example number of a slot that holds no token."""

GPU_MASKS = 64
"""On a GPU the number of noisy slots of a row is a multiple of this, so that memory meets few shapes and the rows of a
dense mask are aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Examples laid end to end in rows of equal length."""

    tokens_RT: Tensor
    """int64 token ids; padding may hold any id."""
    response_RT: Tensor
    """bool, whether the token is part of a response. Response tokens are masked in the noisy stream and trained on."""
    example_RT: Tensor
    """int64, number of the example within the row; `PADDING` after the last example."""
    position_RT: Tensor
    """int64, position within the example, from 0."""

    @classmethod
    def of(cls, tokens_RT: Tensor, response_RT: Tensor, example_RT: Tensor) -> "PackedRows":
        """Return rows whose positions follow from the numbers of the examples."""
        slot_RT = torch.arange(example_RT.shape[1]).expand_as(example_RT)
        starts_RT = torch.ones_like(response_RT)
        starts_RT[:, 1:] = example_RT[:, 1:] != example_RT[:, :-1]
        start_RT = torch.where(starts_RT, slot_RT, 0).cummax(dim=1).values
        return cls(tokens_RT=tokens_RT, response_RT=response_RT, example_RT=example_RT, position_RT=slot_RT - start_RT)

    def select(self, rows: list[int]) -> "PackedRows":
        """Return the rows with these indices."""
        return PackedRows(**{name: getattr(self, name)[rows] for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Inputs of one training forward. Every tensor is [R, S], with the N noisy slots first.

    All that decides a shape is known when the streams are built, on the CPU: the number of noisy slots, and which slots
    have a label. A step on a GPU therefore reads nothing back to find it out.
    """

    noisy: int
    """N, the number of noisy slots of each row."""
    tokens_RS: Tensor
    position_RS: Tensor
    """int64, position within the example, the same for a token and for the mask that replaces it."""
    example_RS: Tensor
    block_RS: Tensor
    """int64, number of the block; comparable only within one example."""
    label_RS: Tensor
    """int64, the token after this position if the loss counts it, otherwise `IGNORE`."""
    twin_RS: Tensor
    """int64, index of the clean slot with the same token."""
    weight_RS: Tensor
    """float32, weight of the label in the loss."""
    noisy_slot_M: Tensor
    """int64 [M], the noisy slots with a label. Slots are counted through all rows."""
    clean_slot_M: Tensor
    """int64 [M], the clean slots with a label."""

    @classmethod
    def of(cls, *, noisy: int, label_RS: Tensor, **tensors: Tensor) -> "Streams":
        """Build streams on the CPU from their other fields, and find the slots with a label."""
        slot_M = (label_RS != IGNORE).flatten().nonzero()[:, 0]
        noisy_M = slot_M % label_RS.shape[1] < noisy
        return cls(
            noisy=noisy, label_RS=label_RS, noisy_slot_M=slot_M[noisy_M], clean_slot_M=slot_M[~noisy_M], **tensors
        )

    @property
    def noisy_RS(self) -> Tensor:
        """Whether each slot belongs to the noisy stream, bool."""
        R, S = self.tokens_RS.shape
        return (torch.arange(S, device=self.tokens_RS.device) < self.noisy).expand(R, S)

    def to(self, device: torch.device | str) -> "Streams":
        """Return the same streams on `device`. A copy to a GPU does not wait for the work that is queued there."""
        tensors = {name: getattr(self, name) for name in self.__slots__ if name != "noisy"}
        return Streams(noisy=self.noisy, **{name: _moved(tensor, device) for name, tensor in tensors.items()})


def _moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def random_phases(rows: PackedRows, block: int, generator: torch.Generator) -> Tensor:
    """Draw the number of tokens by which to shorten the first block of each example: int64 [R, T], 0 to block - 1."""
    phase_RT = torch.randint(block, rows.tokens_RT.shape, generator=generator)
    return phase_RT.gather(1, rows.example_RT.clamp(min=0))


def clean_stream(rows: PackedRows) -> Streams:
    """Build the streams of plain autoregressive fine-tuning: S = T, and no slot is noisy."""
    return Streams.of(
        noisy=0,
        tokens_RS=rows.tokens_RT,
        position_RS=rows.position_RT,
        example_RS=rows.example_RT,
        block_RS=torch.zeros_like(rows.position_RT),
        label_RS=_next_response_token(rows),
        twin_RS=torch.arange(rows.tokens_RT.shape[1]).expand_as(rows.tokens_RT),
        weight_RS=torch.ones(rows.tokens_RT.shape),
    )


def mars_streams(
    rows: PackedRows,
    *,
    block: int,
    mask_id: int,
    phase_RT: Tensor | int = 0,
    decay: float = 1.0,
    first: bool = False,
    multiple_of: int = 1,
) -> Streams:
    """Build `[noisy | clean]` with blocks of `block` tokens.

    `phase_RT` is 0 for blocks at fixed positions, as in the paper, or the result of `random_phases`. The label of a
    mask is the token after it, and a mask with k masks before it in its block has weight `decay`^k in the loss.

    The prompt token before a response predicts the first response token. If no mask precedes the prompt token in its
    block, both streams predict the same token, and `first` gives the noisy slot a label too.

    Padding rounds N up to a multiple of `multiple_of`, but at most to T, so that a GPU meets few shapes.
    """
    clean = clean_stream(rows)
    block_RT = (rows.position_RT + phase_RT) // block
    before_RT = masks_before(rows, block_RT)
    counted_RT = rows.response_RT | (before_RT == 0) if first else rows.response_RT
    label_RT = torch.where(counted_RT, clean.label_RS, IGNORE)
    tokens_RT = rows.tokens_RT.masked_fill(rows.response_RT, mask_id)
    slot_RN, padding_RN = _blocks_with(rows.response_RT | (label_RT != IGNORE), rows, block_RT, multiple_of)

    def both(noisy_RT: Tensor, clean_RT: Tensor, padding: int) -> Tensor:
        return torch.cat([noisy_RT.gather(1, slot_RN).masked_fill(padding_RN, padding), clean_RT], dim=1)

    return Streams.of(
        noisy=slot_RN.shape[1],
        tokens_RS=both(tokens_RT, rows.tokens_RT, mask_id),
        position_RS=both(rows.position_RT, rows.position_RT, 0),
        example_RS=both(rows.example_RT, rows.example_RT, PADDING),
        block_RS=both(block_RT, block_RT, 0),
        label_RS=both(label_RT, clean.label_RS, IGNORE),
        twin_RS=torch.cat([slot_RN, clean.twin_RS], dim=1) + slot_RN.shape[1],
        weight_RS=both(decay**before_RT, clean.weight_RS, 0),
    )


def _next_response_token(rows: PackedRows) -> Tensor:
    """Return the token at t + 1 if it is a response token of the same example, otherwise `IGNORE`, as int64 [R, T]."""
    label_RT = torch.full_like(rows.tokens_RT, IGNORE)
    follows_RT = rows.response_RT[:, 1:] & (rows.example_RT[:, 1:] == rows.example_RT[:, :-1])
    label_RT[:, :-1] = torch.where(follows_RT, rows.tokens_RT[:, 1:], IGNORE)
    return label_RT


def masks_before(rows: PackedRows, block_RT: Tensor) -> Tensor:
    """Return the number of response tokens before each token in its block, as float32 [R, T]."""
    before_RT = rows.response_RT.long().cumsum(dim=1) - rows.response_RT.long()
    # The count never falls along a row, so the count before a block is the maximum over all block starts so far.
    return (before_RT - (before_RT * block_starts(rows, block_RT)).cummax(dim=1).values).float()


def block_starts(rows: PackedRows, block_RT: Tensor) -> Tensor:
    """Return whether a block of an example starts at each position, as bool [R, T]."""
    starts_RT = torch.ones_like(rows.response_RT)
    starts_RT[:, 1:] = (block_RT[:, 1:] != block_RT[:, :-1]) | (rows.example_RT[:, 1:] != rows.example_RT[:, :-1])
    return starts_RT


def _blocks_with(wanted_RT: Tensor, rows: PackedRows, block_RT: Tensor, multiple_of: int) -> tuple[Tensor, Tensor]:
    """Return the positions of blocks with a wanted token, int64 [R, N], and whether each is padding, bool [R, N]."""
    R, T = block_RT.shape
    # The count goes on across the examples of a row.
    block_index_RT = block_starts(rows, block_RT).long().cumsum(dim=1) - 1
    count_RT = torch.zeros(R, T, dtype=torch.long).scatter_add_(1, block_index_RT, wanted_RT.long())
    keep_RT = count_RT.gather(1, block_index_RT) > 0
    return chosen_slots(keep_RT, multiple_of)


def chosen_slots(keep_RT: Tensor, multiple_of: int) -> tuple[Tensor, Tensor]:
    """Return the positions where `keep_RT` is True, int64 [R, N], and whether each is padding, bool [R, N].

    Padding rounds N up to a multiple of `multiple_of`, but at most to T.
    """
    N = min(keep_RT.shape[1], math.ceil(int(keep_RT.sum(dim=1).max()) / multiple_of) * multiple_of)
    slot_RN = torch.argsort((~keep_RT).to(torch.uint8), dim=1, stable=True)[:, :N]
    return slot_RN, ~keep_RT.gather(1, slot_RN)
