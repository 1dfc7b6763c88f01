"""Compute the attention of a training forward on a CPU in tiles, each of which holds a few examples of one row.

A row holds many examples that cannot see each other, so a dense mask over the row is mostly False. Here the slots of
all rows are laid end to end, tile after tile. A tile has its noisy slots before its clean slots and leaves out padding.
Attention is computed piece by piece: some queries of a tile with the keys that they can reach. The rest of the network
sees one long row. On a CPU this saves a third of a step; a GPU would wait for the many small operations, so there the
attention has a dense mask.

The attention is registered with transformers as `ATTENTION`. It gets the pieces as a keyword argument of the network's
forward.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from mars_ray.method.streams import PADDING, Streams
from mars_ray.method.visibility import additive, may_attend

ATTENTION = "mars_tiles"

TILE_SLOTS = 192
"""Number of clean slots at which a tile takes no more examples. In smaller tiles a call costs more than its
arithmetic."""
PIECE_QUERIES = 256
"""Maximum number of clean queries in a piece. A piece of a long example reads no keys after its last query."""
KEYS_HELD = 2048
"""Maximum number of keys for which attention weights are kept for the backward pass."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive queries of a tile, and the range of keys that they may attend to."""

    queries: int
    """Number of queries. The pieces of a tile cover its queries in order."""
    keys: slice
    hidden: Tensor
    """Mask [queries, keys]: 0 where attention is allowed, -inf elsewhere."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A few examples of one row."""

    noisy: int
    """Number of noisy slots, which come first."""
    keys: int
    """Number of slots."""
    pieces: list[Piece]
    """The piece of the noisy slots, if there are any, and then those of the clean slots."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Slots of all rows of a forward, laid end to end."""

    slot_P: Tensor
    """int64, slot at each place; slots are counted through all rows."""
    place_RS: Tensor
    """int64, place of each slot; 0 for padding, which has no place."""
    tiles: list[Tile]
    """The tiles in the order of their places."""


def lay_out(streams: Streams, dtype: torch.dtype) -> Layout:
    """Lay the slots of all rows end to end, and cut attention into pieces with masks of `dtype`."""
    R, S = streams.tokens_RS.shape
    slots: list[Tensor] = []
    tiles: list[Tile] = []
    for r in range(R):
        for first, last in _tiles(streams, r):
            slot_L = ((streams.example_RS[r] >= first) & (streams.example_RS[r] < last)).nonzero()[:, 0]
            tiles.append(_tile(streams, r, slot_L, dtype))
            slots.append(slot_L + r * S)
    slot_P = torch.cat(slots)
    place_RS = torch.zeros(R * S, dtype=torch.long, device=slot_P.device)
    place_RS[slot_P] = torch.arange(len(slot_P), device=slot_P.device)
    return Layout(slot_P, place_RS.view(R, S), tiles)


def _tiles(streams: Streams, r: int) -> list[tuple[int, int]]:
    """Return the examples of a row in groups, as pairs of the first example and the one after the last."""
    example_T = streams.example_RS[r, streams.noisy :]
    tiles, first, slots = [], 0, 0
    counts = torch.bincount(example_T[example_T != PADDING]).tolist()
    for number, count in enumerate(counts):
        slots += count
        if slots >= TILE_SLOTS or number == len(counts) - 1:
            tiles.append((first, number + 1))
            first, slots = number + 1, 0
    return tiles


def _tile(streams: Streams, r: int, slot_L: Tensor, dtype: torch.dtype) -> Tile:
    """Cut the attention of some slots of a row into pieces."""
    slots, noisy = len(slot_L), int((slot_L < streams.noisy).sum())
    visible = may_attend(
        streams, lambda field_RS: field_RS[r, slot_L][:, None], lambda field_RS: field_RS[r, slot_L][None]
    )
    hidden = additive(visible, dtype)
    pieces = [Piece(noisy, slice(0, slots), hidden[:noisy])] if noisy else []
    for begin in range(noisy, slots, PIECE_QUERIES):
        end = min(begin + PIECE_QUERIES, slots)
        pieces.append(Piece(end - begin, slice(noisy, end), hidden[begin:end, noisy:end].contiguous()))
    return Tile(noisy, slots, pieces)


def attend(
    _module: nn.Module,
    query_1HPD: Tensor,
    key_1KPD: Tensor,
    value_1KPD: Tensor,
    _mask: None,
    *,
    scaling: float,
    tiles: list[Tile],
    dropout: float = 0.0,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention piece by piece and return [1, P, H, D]."""
    outs: list[Tensor] = []
    # Use split, because the gradient of a slice would be as large as the whole tensor.
    queries = torch.split(query_1HPD[0], [piece.queries for tile in tiles for piece in tile.pieces], dim=1)
    lengths = [tile.keys for tile in tiles]
    keys_of, values_of = (torch.split(tensor[0], lengths, dim=1) for tensor in (key_1KPD, value_1KPD))
    for tile, keys, values in zip(tiles, keys_of, values_of, strict=True):
        for piece in tile.pieces:
            query = queries[len(outs)]
            key = keys[:, piece.keys]
            value = values[:, piece.keys]
            outs.append(_attend_piece(query, key, value, piece.hidden, scaling, dropout))
    return torch.cat(outs, dim=1).transpose(0, 1)[None], None


def _attend_piece(
    query_HQD: Tensor, key_KCD: Tensor, value_KCD: Tensor, hidden_QC: Tensor, scaling: float, dropout: float = 0.0
) -> Tensor:
    """Return the attention [H, Q, D] of Q queries to C keys. `hidden_QC` is 0 where it is allowed, -inf elsewhere."""
    groups = query_HQD.shape[0] // key_KCD.shape[0]
    # Stack the query heads that share a key head as more queries; otherwise the keys would be copied for each head.
    query = query_HQD.reshape(key_KCD.shape[0], -1, query_HQD.shape[2])
    hidden = hidden_QC.repeat(groups, 1)
    if key_KCD.shape[1] > KEYS_HELD:
        out = F.scaled_dot_product_attention(
            query[None], key_KCD[None], value_KCD[None], attn_mask=hidden, dropout_p=dropout, scale=scaling
        )
    else:
        # For few keys, matrix products are faster on a CPU than the fused kernel, which does not keep the weights.
        weights = torch.baddbmm(hidden, query, key_KCD.transpose(1, 2), alpha=scaling).softmax(dim=-1)
        out = (F.dropout(weights, dropout) if dropout else weights) @ value_KCD
    return out.reshape(query_HQD.shape)


AttentionInterface.register(ATTENTION, attend)
