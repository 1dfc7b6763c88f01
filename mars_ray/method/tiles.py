"""Attention of a training forward by tiles: examples that may see each other, without the rest of their row.

A row holds many examples, and a dense mask over it is mostly False. Here all slots of all rows are laid end to end, a
few examples of one row at a time (a tile), noisy slots before clean ones and padding left out, and attention is
computed piece by piece: some queries of a tile with the keys that they can reach. Everything else of the network sees
one long row.

Registered with transformers under `ATTENTION`; the pieces reach it as a keyword argument of the network's forward.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from mars_ray.method.streams import PADDING, Streams
from mars_ray.method.visibility import dense_mask

ATTENTION = "mars_tiles"

TILE_SLOTS = 192
"""Short examples share a tile until it has so many clean slots: below that a call costs more than its arithmetic."""
PIECE_QUERIES = 256
"""Clean queries of a piece: each next piece of a long example reads more keys, none reads those to its right."""
KEYS_HELD = 2048
"""Attention weights over more keys than this are not kept for the backward pass."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive queries of a tile, and the consecutive keys that any of them attends to."""

    queries: int
    """The number of queries; the pieces of a tile stand in their order."""
    keys: slice
    hidden: Tensor
    """[queries, keys]: 0 where attention is allowed, -inf elsewhere."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of a forward laid end to end."""

    slot_P: Tensor
    """int64, the slot, counted through all rows, that stands at each place."""
    place_RS: Tensor
    """int64, where each slot stands; 0 for padding, which stands nowhere."""
    tiles: list[list[Piece]]
    """In the order of their places."""


def lay_out(streams: Streams, dtype: torch.dtype) -> Layout:
    """Lay the slots of all rows end to end, and cut attention into pieces with masks of `dtype`."""
    R, S = streams.tokens_RS.shape
    slots: list[Tensor] = []
    tiles: list[list[Piece]] = []
    for r in range(R):
        for first, last in _tiles(streams, r):
            slot_L = ((streams.example_RS[r] >= first) & (streams.example_RS[r] < last)).nonzero()[:, 0]
            tiles.append(_pieces(streams.select(r, slot_L), dtype))
            slots.append(slot_L + r * S)
    slot_P = torch.cat(slots)
    place_RS = torch.zeros(R * S, dtype=torch.long, device=slot_P.device)
    place_RS[slot_P] = torch.arange(len(slot_P), device=slot_P.device)
    return Layout(slot_P, place_RS.view(R, S), tiles)


def _tiles(streams: Streams, r: int) -> list[tuple[int, int]]:
    """Return the examples of a row in groups, each as the first number and the one behind the last."""
    example_T = streams.example_RS[r][~streams.noisy_RS[r]]
    tiles, first, slots = [], 0, 0
    counts = torch.bincount(example_T[example_T != PADDING]).tolist()
    for number, count in enumerate(counts):
        slots += count
        if slots >= TILE_SLOTS or number == len(counts) - 1:
            tiles.append((first, number + 1))
            first, slots = number + 1, 0
    return tiles


def _pieces(tile: Streams, dtype: torch.dtype) -> list[Piece]:
    """Cut a tile, the only row of `tile`, noisy slots before clean ones."""
    slots, noisy = tile.tokens_RS.shape[1], int(tile.noisy_RS.sum())
    hidden = torch.zeros(slots, slots, dtype=dtype, device=tile.tokens_RS.device)
    hidden.masked_fill_(~dense_mask(tile)[0, 0], -torch.inf)
    pieces = [Piece(noisy, slice(0, slots), hidden[:noisy])] if noisy else []
    for begin in range(noisy, slots, PIECE_QUERIES):
        end = min(begin + PIECE_QUERIES, slots)
        pieces.append(Piece(end - begin, slice(noisy, end), hidden[begin:end, noisy:end].contiguous()))
    return pieces


def attend(
    _module: nn.Module,
    query_1HPD: Tensor,
    key_1KPD: Tensor,
    value_1KPD: Tensor,
    _mask: None,
    *,
    scaling: float,
    tiles: list[list[Piece]],
    dropout: float = 0.0,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attend piece by piece and return [1, P, H, D]."""
    outs: list[Tensor] = []
    # Split and not sliced: the gradient of a slice is as large as the whole.
    queries = torch.split(query_1HPD[0], [piece.queries for tile in tiles for piece in tile], dim=1)
    lengths = [sum(piece.queries for piece in tile) for tile in tiles]
    keys_of, values_of = (torch.split(each[0], lengths, dim=1) for each in (key_1KPD, value_1KPD))
    for tile, keys, values in zip(tiles, keys_of, values_of, strict=True):
        for piece in tile:
            query, within = queries[len(outs)], piece.keys
            outs.append(attend_piece(query, keys[:, within], values[:, within], piece.hidden, scaling, dropout))
    return torch.cat(outs, dim=1).transpose(0, 1)[None], None


def attend_piece(
    query_HQD: Tensor, key_KCD: Tensor, value_KCD: Tensor, hidden_QC: Tensor, scaling: float, dropout: float = 0.0
) -> Tensor:
    """Attend from Q queries to C keys: [H, Q, D]; `hidden_QC` is 0 where that is allowed, -inf elsewhere."""
    groups = query_HQD.shape[0] // key_KCD.shape[0]
    # Query heads that share a key head become queries of it, or the keys would be copied for each of them.
    query, hidden = query_HQD.reshape(key_KCD.shape[0], -1, query_HQD.shape[2]), hidden_QC.repeat(groups, 1)
    if key_KCD.shape[1] > KEYS_HELD:
        out = F.scaled_dot_product_attention(
            query[None], key_KCD[None], value_KCD[None], attn_mask=hidden, dropout_p=dropout, scale=scaling
        )
    else:
        # For keys this few, matrix products are faster on a CPU than the kernel that keeps no weights.
        weights = torch.baddbmm(hidden, query, key_KCD.transpose(1, 2), alpha=scaling).softmax(dim=-1)
        out = (F.dropout(weights, dropout) if dropout else weights) @ value_KCD
    return out.view(*query_HQD.shape)


AttentionInterface.register(ATTENTION, attend)
