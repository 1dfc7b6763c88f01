"""The two forwards of adapter training: the base over clean tokens, then the masks, which attend to the base's keys and
values.

The first forward has no gradients; it computes the keys, values and targets for all masks. The second forward contains
only masks; it has gradients, and the low-rank products are added.
"""

from collections import UserList
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.method.logits import logits_at
from mars_ray.method.streams import Streams
from mars_ray.method.tiles import Layout, Piece, attend, attend_piece, lay_out

ATTENTION = "mars_adapter"


class KeysAndValues(UserList[tuple[Tensor, Tensor]]):
    """The keys and the values of each layer at the clean positions; each tensor is [key heads, clean positions, D].

    FSDP may give a network copies of plain lists; what the network appends to a copy would be lost.
    """


@dataclass(frozen=True, slots=True)
class MaskTile:
    """Number of masks and clean slots in an attention tile, and the slots that the masks may attend to."""

    masks: int
    clean: int
    hidden: Tensor
    """Additive attention mask, [masks, masks + clean]: 0 where a mask may attend, otherwise -inf."""


@dataclass(frozen=True, slots=True)
class MaskLogits:
    """Outputs of both forwards at the masks."""

    logits_MV: Tensor
    """Logits of the masks, not corrected by the sampler head."""
    hidden_MH: Tensor
    """Last hidden states of the masks."""
    teacher_MV: Tensor
    """Logits of the base at the same positions."""
    slot_M: Tensor
    """Slot of each mask, numbered across all packed sequences."""
    before_M: Tensor
    """Token before each mask's target, which is the clean token at the mask's own position."""


def mask_logits(network: PreTrainedModel, adapter: GatedLoRA, streams: Streams) -> MaskLogits:
    """Run both forwards over the result of `mask_streams`; `network` must use the attention `ATTENTION`."""
    layout = lay_out(streams, network.dtype)
    slot_P = layout.slot_P
    noisy_P = streams.noisy_RS.flatten()[slot_P]
    slot_M = slot_P[noisy_P]
    slot_C = slot_P[~noisy_P]
    clean_tiles, mask_tiles = _tiles(layout, noisy_P)
    width = streams.tokens_RS.shape[1]
    twin_M = streams.twin_RS.flatten()[slot_M] + slot_M // width * width
    index_C = (~noisy_P).long().cumsum(dim=0) - 1
    teacher_M = index_C[layout.place_RS.flatten()[twin_M]]
    tokens = streams.tokens_RS.flatten()
    positions = streams.position_RS.flatten()
    seen = KeysAndValues()
    with torch.no_grad():
        teacher_MV = logits_at(
            network,
            (torch.zeros_like(teacher_M), teacher_M),
            input_ids=tokens[slot_C][None],
            position_ids=positions[slot_C][None],
            tiles=clean_tiles,
            seen=seen,
        )
    hidden: list[Tensor] = []
    head = network.get_output_embeddings()
    with adapter.at(None), head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][0])):
        logits_MV = network(
            inputs_embeds=adapter.masks(tokens[slot_M])[None].to(network.dtype),
            position_ids=positions[slot_M][None],
            use_cache=False,
            mask_tiles=mask_tiles,
            seen=seen,
        ).logits[0]
    return MaskLogits(logits_MV, hidden[0], teacher_MV, slot_M, tokens[twin_M])


def _tiles(layout: Layout, noisy_P: Tensor) -> tuple[list[list[Piece]], list[MaskTile]]:
    """Split each tile into its masks and its clean pieces, and number the pieces' keys from the first clean slot."""
    clean_tiles: list[list[Piece]] = []
    mask_tiles: list[MaskTile] = []
    start = 0
    for tile in layout.tiles:
        slots = sum(piece.queries for piece in tile)
        masks = int(noisy_P[start : start + slots].sum())
        clean = tile[1:] if masks else tile
        clean_tiles.append(
            [
                Piece(piece.queries, slice(piece.keys.start - masks, piece.keys.stop - masks), piece.hidden)
                for piece in clean
            ]
        )
        hidden = tile[0].hidden if masks else torch.empty(0, slots)
        mask_tiles.append(MaskTile(masks, slots - masks, hidden))
        start += slots
    return clean_tiles, mask_tiles


def _attend(
    module: nn.Module,
    query_1HPD: Tensor,
    key_1KPD: Tensor,
    value_1KPD: Tensor,
    _mask: None,
    *,
    scaling: float,
    seen: KeysAndValues,
    tiles: list[list[Piece]] | None = None,
    mask_tiles: list[MaskTile] | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Let clean tokens attend to clean tokens and append their keys and values to `seen`; or, given `mask_tiles`, let
    masks attend to `seen` and to masks."""
    if mask_tiles is None:
        assert tiles is not None
        seen.append((key_1KPD[0], value_1KPD[0]))
        return attend(module, query_1HPD, key_1KPD, value_1KPD, None, scaling=scaling, tiles=tiles)
    masks = [tile.masks for tile in mask_tiles]
    clean = [tile.clean for tile in mask_tiles]
    of_masks = (torch.split(states[0], masks, dim=1) for states in (query_1HPD, key_1KPD, value_1KPD))
    of_clean = (torch.split(states, clean, dim=1) for states in seen[module.layer_idx])  # type: ignore[index]
    outs = [
        attend_piece(query, torch.cat([key, clean_key], 1), torch.cat([value, clean_value], 1), tile.hidden, scaling)
        for tile, query, key, value, clean_key, clean_value in zip(mask_tiles, *of_masks, *of_clean, strict=True)
        if tile.masks
    ]
    return torch.cat(outs, dim=1).transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION, _attend)
