"""Attention of one engine step over the cache, for any unmodified HF decoder.

In:    queries, keys and values of N packed positions; where each belongs.
Out:   the attention output of each; its key and value are in the cache.
Never: reads what it has not written, for no position looks to its right.

Registered with transformers under `ATTENTION`; the model is called with `use_cache=False` and our tensors as keyword
arguments, which it hands down to this function.

Letters: N packed positions, R active rows, P positions of the widest decoding row, L rows that read a prompt,
Q positions of the longest part of a prompt, C columns of the cache, G query heads per key head, H heads, D their size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "mars_slots"

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [rows, key heads, width, D]."""


@dataclass(slots=True)
class Rectangle:
    """Some of the packed positions, laid out by row for one attention call."""

    where_RP: Tensor
    """Which of the N positions stands here; fillers name any."""
    visible_RPC: Tensor
    """0 where the position may attend to the column, -inf elsewhere, in the dtype of the queries."""


def visible(where_RP: Tensor, position_N: Tensor, column_C: Tensor, dtype: torch.dtype) -> Tensor:
    """Causal attention over the columns 0..C-1 of a row: [R, P, C], to be added to the scores."""
    unseen_RPC = column_C > position_N[where_RP][..., None]
    return torch.zeros_like(unseen_RPC, dtype=dtype).masked_fill_(unseen_RPC, -torch.inf)


@dataclass(slots=True)
class Prompts:
    """The rows that read a prompt, in a rectangle of their own."""

    where_LQ: Tensor
    row_L: Tensor
    column_C: Tensor

    def rectangle(self, position_N: Tensor, dtype: torch.dtype) -> Rectangle:
        """Return the layout for attention."""
        return Rectangle(self.where_LQ, visible(self.where_LQ, position_N, self.column_C, dtype))


def attend(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    _mask: None,
    *,
    scaling: float,
    layers: Layers,
    row_N: Tensor,
    position_N: Tensor,
    back_N: Tensor,
    decoding: Rectangle,
    prompts: Rectangle | None = None,
    prompt_row_L: Tensor | None = None,
    sliding_window: int | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Write keys and values, attend, and return [1, N, H, D].

    `decoding` covers all active rows, which are the first of the cache; `prompts` the rows `prompt_row_L`, copied.
    """
    keys, values = layers[module.layer_idx]  # type: ignore[index]
    keys[row_N, :, position_N] = key_1KND[0].transpose(0, 1)
    values[row_N, :, position_N] = value_1KND[0].transpose(0, 1)
    query_NHD = query_1HND[0].transpose(0, 1)
    rows = decoding.where_RP.shape[0]
    parts = [_attend(query_NHD, keys[:rows], values[:rows], decoding, position_N, scaling, sliding_window)]
    if prompts is not None:
        columns = prompts.visible_RPC.shape[-1]
        read = (keys[prompt_row_L, :, :columns], values[prompt_row_L, :, :columns])
        parts.append(_attend(query_NHD, *read, prompts, position_N, scaling, sliding_window))
    return torch.cat(parts)[back_N][None], None


def _attend(
    query_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    rectangle: Rectangle,
    position_N: Tensor,
    scaling: float,
    sliding_window: int | None,
) -> Tensor:
    """Attend in one rectangle: [R * P, H, D]."""
    where_RP, visible_RPC = rectangle.where_RP, rectangle.visible_RPC
    (rows, positions), columns, heads = where_RP.shape, visible_RPC.shape[-1], keys.shape[1]
    if sliding_window is not None:
        column_C = torch.arange(columns, device=where_RP.device)
        outside_RPC = column_C <= position_N[where_RP][..., None] - sliding_window
        visible_RPC = visible_RPC.masked_fill(outside_RPC, -torch.inf)
    groups, size = query_NHD.shape[1] // heads, query_NHD.shape[2]
    # Query heads that share a key head become positions of it, or the keys would be copied for each of them.
    query = query_NHD[where_RP].view(rows, positions, heads, groups, size).permute(0, 2, 3, 1, 4)
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads, groups * positions, size),
        keys[:, :, :columns],
        values[:, :, :columns],
        attn_mask=visible_RPC[:, None, None].expand(-1, -1, groups, -1, -1).reshape(rows, 1, -1, columns),
        scale=scaling,
    )
    by_position = out.view(rows, heads, groups, positions, size).permute(0, 3, 1, 2, 4)
    return by_position.reshape(rows * positions, heads * groups, size)


AttentionInterface.register(ATTENTION, attend)
