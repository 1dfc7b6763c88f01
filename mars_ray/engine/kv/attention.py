"""Attention of one engine step over the KV cache, for any unmodified HF decoder, sequence by sequence.

The keys and values of the N packed positions are written to the cache, and queries attend to the cache only, never to a
column that was not written.

`attend` is registered with transformers under `ATTENTION`. The model is called with `use_cache=False` and with the
tensors of the step as keyword arguments, which it passes on to `attend`.

Letters are those of `forward_batch`, and also P for the positions of one span, C for the columns that they read, H
for query heads, K for key heads, G for query heads per key head, and D for the head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.errors import ModelError

ATTENTION = "mars_slots"

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, as tensors [slots, key heads, width, D]."""


@dataclass(slots=True)
class SlotView:
    """The positions of a span and what they may attend to, which all layers share."""

    positions: slice
    """The packed positions."""
    slot: int
    position_P1: Tensor
    column_C: Tensor
    visible_PC: Tensor
    """Attention mask: 0 where a position may attend to a column, otherwise -inf."""


def slot_views(batch: ForwardBatch, dtype: torch.dtype) -> list[SlotView]:
    """Return the views of the spans of a batch, in the order of their positions, with masks of `dtype`."""
    views = []
    start = 0
    for span in batch.spans:
        positions = slice(start, start := start + span.positions)
        column_C = torch.arange(span.columns, device=batch.id_N.device)
        beyond_PC = column_C - batch.prefix_N[positions, None]
        hidden_PC = (beyond_PC >= 0) & ((batch.behind_N[positions, None] >> beyond_PC.clamp(0, 63)) & 1 == 0)
        position_P1 = batch.position_N[positions, None]
        views.append(SlotView(positions, span.slot, position_P1, column_C, _mask(hidden_PC, dtype)))
    return views


def attend(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    layers: Layers,
    batch: ForwardBatch,
    views: list[SlotView],
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Write keys and values to the cache, attend, and return the output [1, N, H, D].

    With `softcap`, a score s becomes softcap * tanh(s / softcap). Raises `ModelError` for a network that adds a mask.
    """
    if mask is not None:
        raise ModelError("The attention of this model adds numbers of its own to scores. Choose another model.")
    keys, values = layers[module.layer_idx]  # type: ignore[index]
    keys[batch.slot_N, :, batch.target_N] = key_1KND[0].transpose(0, 1)
    values[batch.slot_N, :, batch.target_N] = value_1KND[0].transpose(0, 1)
    outs = [
        _attend(
            query_1HND[0, :, view.positions],
            keys[view.slot],
            values[view.slot],
            view,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        for view in views
    ]
    return torch.cat(outs, dim=1).transpose(0, 1)[None], None


def _attend(
    query_HPD: Tensor,
    keys: Tensor,
    values: Tensor,
    view: SlotView,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return the attention [H, P, D] of one span to its slot."""
    columns = len(view.column_C)
    key_KCD, value_KCD = keys[:, :columns], values[:, :columns]
    visible_PC = view.visible_PC
    if sliding_window is not None:
        outside_PC = view.column_C <= view.position_P1 - sliding_window
        visible_PC = visible_PC + _mask(outside_PC, visible_PC.dtype)
    # Query heads that share a key head become further positions, so that the keys are not copied for each query head.
    query = query_HPD.reshape(len(keys), -1, query_HPD.shape[2])
    visible = visible_PC.repeat(query.shape[1] // len(visible_PC), 1)
    if softcap is None:
        out = nn.functional.scaled_dot_product_attention(
            query[None], key_KCD[None], value_KCD[None], attn_mask=visible, scale=scaling
        )
    else:
        capped = (query @ key_KCD.transpose(1, 2) * scaling / softcap).tanh() * softcap
        out = (capped + visible).softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value_KCD
    return out.reshape(query_HPD.shape)


def _mask(hidden_PC: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(hidden_PC, dtype=dtype).masked_fill_(hidden_PC, -torch.inf)


AttentionInterface.register(ATTENTION, attend)
