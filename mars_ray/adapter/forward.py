"""The two forwards of adapter training: the base over clean tokens, then the masks, which attend to the base's keys and
values.

The first forward has no gradients; it computes the keys, values and targets for all masks. The second forward contains
only masks; it has gradients, and the low-rank products are added.

Letters: C clean positions of the first forward.
"""

from collections import UserList
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.method.logits import logits_at
from mars_ray.method.loss import attention_dtype
from mars_ray.method.streams import Streams
from mars_ray.method.tiles import Piece, Tile, attend, lay_out
from mars_ray.method.visibility import additive, dense_mask

ATTENTION = "mars_adapter"
"""Attention with a dense mask."""
TILED = "mars_adapter_tiles"
"""Attention in tiles, as `tiles.ATTENTION` computes it."""


class KeysAndValues(UserList[tuple[Tensor, Tensor]]):
    """The keys and the values of each layer at the clean positions; each tensor is [rows, key heads, C, D].

    FSDP may give a network copies of plain lists; what the network appends to a copy would be lost.
    """


@dataclass(frozen=True, slots=True)
class Plan:
    """Inputs of both forwards. A place is a pair of tensors [M], which index the rows and columns of a forward."""

    clean_slots: Tensor
    """Slots of the first forward, int64 [rows, C]; slots are counted through all rows of the streams."""
    clean_attention: dict[str, Any]
    """What the attention of the first forward reads."""
    teachers: tuple[Tensor, Tensor]
    """Place in the first forward of each mask's twin."""
    mask_slots: Tensor
    """Slots of the second forward, int64."""
    mask_attention: dict[str, Any]
    masks: tuple[Tensor, Tensor]
    """Place in the second forward of each mask."""


@dataclass(frozen=True, slots=True)
class MaskLogits:
    """Outputs of both forwards at the masks, in the order of `Streams.noisy_slot_M`."""

    logits_MV: Tensor
    """Logits of the masks, not corrected by the sampler head."""
    hidden_MH: Tensor
    """Last hidden states of the masks."""
    teacher_MV: Tensor
    """Logits of the base at the same positions."""
    before_M: Tensor
    """Token before each mask's target, which is the clean token at the mask's own position."""


def mask_logits(network: PreTrainedModel, adapter: GatedLoRA, streams: Streams) -> MaskLogits:
    """Run both forwards over the result of `mask_streams`; `network` must use the attention `ATTENTION` or `TILED`."""
    width = streams.tokens_RS.shape[1]
    slot_M = streams.noisy_slot_M
    twin_M = streams.twin_RS.flatten()[slot_M] + slot_M // width * width
    plan_of = _in_tiles if network.config._attn_implementation == TILED else _in_rows
    plan = plan_of(streams, twin_M, attention_dtype(network))
    tokens = streams.tokens_RS.flatten()
    positions = streams.position_RS.flatten()
    seen = KeysAndValues()
    with torch.no_grad():
        teacher_MV = logits_at(
            network,
            plan.teachers,
            input_ids=tokens[plan.clean_slots],
            position_ids=positions[plan.clean_slots],
            keep=seen,
            **plan.clean_attention,
        )
    hidden: list[Tensor] = []
    head = network.get_output_embeddings()
    recording = head.register_forward_hook(lambda _head, inputs, _logits: hidden.append(inputs[0][0]))
    with adapter.at(None), recording:
        logits_MV = logits_at(
            network,
            plan.masks,
            inputs_embeds=adapter.masks(tokens[plan.mask_slots]).to(network.dtype),
            position_ids=positions[plan.mask_slots],
            seen=seen,
            **plan.mask_attention,
        )
    return MaskLogits(logits_MV, hidden[0], teacher_MV, tokens[twin_M])


def _in_rows(streams: Streams, twin_M: Tensor, dtype: torch.dtype) -> Plan:
    """Plan forwards over the rows of the streams, with dense masks. All shapes are known without their values."""
    R, S = streams.tokens_RS.shape
    N = streams.noisy
    slot_RS = torch.arange(R * S, device=twin_M.device).view(R, S)
    clean, masks = slice(N, None), slice(N)
    slot_M = streams.noisy_slot_M
    return Plan(
        clean_slots=slot_RS[:, clean],
        clean_attention={"attention_mask": additive(dense_mask(streams, clean, clean), dtype)},
        teachers=(twin_M // S, twin_M % S - N),
        mask_slots=slot_RS[:, masks],
        mask_attention={"attention_mask": additive(dense_mask(streams, masks), dtype)},
        masks=(slot_M // S, slot_M % S),
    )


def _in_tiles(streams: Streams, twin_M: Tensor, dtype: torch.dtype) -> Plan:
    """Plan forwards over one long row, whose attention is cut into tiles."""
    layout = lay_out(streams, dtype)
    clean_C = layout.slot_P[~streams.noisy_RS.flatten()[layout.slot_P]]
    index = torch.empty_like(streams.tokens_RS).flatten()
    index[clean_C] = torch.arange(len(clean_C), device=clean_C.device)
    mask_M = torch.arange(len(twin_M), device=twin_M.device)
    row_M = torch.zeros_like(mask_M)
    return Plan(
        clean_slots=clean_C[None],
        clean_attention={"tiles": [_clean_part(tile) for tile in layout.tiles]},
        teachers=(row_M, index[twin_M]),
        mask_slots=streams.noisy_slot_M[None],
        mask_attention={"tiles": [Tile(tile.noisy, tile.keys, tile.pieces[: tile.noisy > 0]) for tile in layout.tiles]},
        masks=(row_M, mask_M),
    )


def _clean_part(tile: Tile) -> Tile:
    """Return a tile without its masks, whose keys are numbered from the first clean slot."""
    pieces = [
        Piece(piece.queries, slice(piece.keys.start - tile.noisy, piece.keys.stop - tile.noisy), piece.hidden)
        for piece in tile.pieces[tile.noisy > 0 :]
    ]
    return Tile(0, tile.keys - tile.noisy, pieces)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    keep: KeysAndValues | None = None,
    seen: KeysAndValues | None = None,
    tiles: list[Tile] | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Let clean tokens attend to clean tokens and append their keys and values to `keep`; or let masks attend to masks
    and to `seen`."""
    if keep is not None:
        keep.append((key, value))
    if seen is not None:
        key, value = (
            _joined(states, clean, tiles)
            for states, clean in zip((key, value), seen[module.layer_idx], strict=True)  # type: ignore[index]
        )
    if tiles is not None:
        return attend(module, query, key, value, None, tiles=tiles, **arguments)
    out: Tensor = sdpa_attention_forward(module, query, key, value, mask, **arguments)[0]
    return out, None


def _joined(masks: Tensor, clean: Tensor, tiles: list[Tile] | None) -> Tensor:
    """Return the states of masks and those of clean tokens as one tensor, with masks first in each row or tile."""
    if tiles is None:
        return torch.cat([masks, clean], dim=2)
    of_masks = torch.split(masks, [tile.noisy for tile in tiles], dim=2)
    of_clean = torch.split(clean, [tile.keys - tile.noisy for tile in tiles], dim=2)
    return torch.cat([part for pair in zip(of_masks, of_clean, strict=True) for part in pair], dim=2)


AttentionInterface.register(ATTENTION, _attend)
AttentionInterface.register(TILED, _attend)
