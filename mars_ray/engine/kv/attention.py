"""Attention of one engine step over the KV cache, for any unmodified HF decoder.

The keys and values of the N packed positions are written to the cache, and queries attend to the cache only, never to a
column that was not written.

`attend` is registered with transformers under `ATTENTION`. The model is called with `use_cache=False` and with the
tensors of the step as keyword arguments, which it passes on to `attend`.

Letters are those of `forward_batch`, and also H for query heads, K for key heads, G for query heads per key head, and D
for the head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mars_ray.engine.kv.forward_batch import ForwardBatch

ATTENTION = "mars_slots"

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, as tensors [slots, key heads, width, D]."""


@dataclass(slots=True)
class Rectangle:
    """Packed positions laid out for one attention call, with one row per slot."""

    where_RP: Tensor
    """The packed position in each cell; filler cells hold an arbitrary position."""
    position_RP: Tensor
    column_C: Tensor
    """Columns of the cache that the rectangle reads."""
    visible: Tensor
    """Attention mask [R, 1, G * P, C]: 0 where a position may attend to a column, otherwise -inf."""


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """The rules that make attention weights of the products of queries and keys in one layer."""

    scaling: float
    sliding_window: int | None
    softcap: float | None
    """Soft cap: a score s becomes softcap * tanh(s / softcap)."""


def decoding_rectangle(batch: ForwardBatch, groups: int, dtype: torch.dtype) -> Rectangle:
    """Return the first rectangle of a step, with the active slots. All layers share it."""
    return _rectangle(batch, batch.where_RP, batch.column_C, groups, dtype)


def prefill_rectangle(batch: ForwardBatch, groups: int, dtype: torch.dtype) -> Rectangle | None:
    """Return the second rectangle, with the slots that read prompts; None if all slots share the first one."""
    if batch.prefill is None:
        return None
    return _rectangle(batch, batch.prefill.where_LQ, batch.prefill.column_C, groups, dtype)


def _rectangle(batch: ForwardBatch, where_RP: Tensor, column_C: Tensor, groups: int, dtype: torch.dtype) -> Rectangle:
    beyond_RPC = column_C - batch.prefix_N[where_RP][..., None]
    behind_RP1 = batch.behind_N[where_RP][..., None]
    hidden_RPC = (beyond_RPC >= 0) & ((behind_RP1 >> beyond_RPC.clamp(0, 63)) & 1 == 0)
    return Rectangle(where_RP, batch.position_N[where_RP], column_C, _hidden(hidden_RPC, groups, dtype))


def attend(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    _mask: None,
    *,
    scaling: float,
    layers: Layers,
    batch: ForwardBatch,
    decoding: Rectangle,
    prefill: Rectangle | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Write keys and values to the cache, attend, and return the output [1, N, H, D].

    `decoding` reads the active slots, which come first in the cache, as a slice; `prefill` reads copies of its slots.
    """
    scores = ScoreRules(scaling, sliding_window, softcap)
    keys, values = layers[module.layer_idx]  # type: ignore[index]
    # When compiled, index_copy_ into one slot would copy the whole layer; this assignment writes in place.
    keys[batch.slot_N, :, batch.target_N] = key_1KND[0].transpose(0, 1)
    values[batch.slot_N, :, batch.target_N] = value_1KND[0].transpose(0, 1)
    if decoding.where_RP.shape[0] == 1 and prefill is None:
        return _attend_alone(query_1HND, keys[:1], values[:1], decoding, scores), None
    query_NHD = query_1HND[0].transpose(0, 1)
    rows = decoding.where_RP.shape[0]
    out_NHD = _attend(query_NHD, keys[:rows], values[:rows], decoding, scores)
    if batch.prefill is not None and prefill is not None:
        slot_L = batch.prefill.slot_L
        columns = prefill.column_C.shape[0]
        read = (keys[slot_L, :, :columns], values[slot_L, :, :columns])
        out_NHD = torch.cat([out_NHD, _attend(query_NHD, *read, prefill, scores)])
    return out_NHD[batch.back_N][None], None


def _attend_alone(query_1HND: Tensor, keys: Tensor, values: Tensor, within: Rectangle, scores: ScoreRules) -> Tensor:
    """Return attention [1, N, H, D] for a single active slot, whose cells are in packed order."""
    _, heads, positions, size = query_1HND.shape
    query = query_1HND.reshape(1, keys.shape[1], -1, size)
    out = _scores_and_values(query, keys, values, within, scores)
    return out.view(1, heads, positions, size).transpose(1, 2)


def _attend(query_NHD: Tensor, keys: Tensor, values: Tensor, within: Rectangle, scores: ScoreRules) -> Tensor:
    """Return attention [R * P, H, D] in one rectangle."""
    rows, positions = within.where_RP.shape
    heads = keys.shape[1]
    size = query_NHD.shape[2]
    groups = query_NHD.shape[1] // heads
    # Query heads that share a key head become further positions, so that the keys are not copied for each query head.
    query = query_NHD[within.where_RP].view(rows, positions, heads, groups, size).permute(0, 2, 3, 1, 4)
    query = query.reshape(rows, heads, groups * positions, size)
    out = _scores_and_values(query, keys, values, within, scores)
    by_position = out.view(rows, heads, groups, positions, size).permute(0, 3, 1, 2, 4)
    return by_position.reshape(rows * positions, heads * groups, size)


def _scores_and_values(query: Tensor, keys: Tensor, values: Tensor, within: Rectangle, scores: ScoreRules) -> Tensor:
    """Return attention of the queries [R, K, G * P, D] to the columns that each position may attend to."""
    columns = within.column_C.shape[0]
    visible = within.visible
    if scores.sliding_window is not None:
        outside_RPC = within.column_C <= within.position_RP[..., None] - scores.sliding_window
        visible = visible + _hidden(outside_RPC, query.shape[2] // within.where_RP.shape[1], visible.dtype)
    keys = keys[:, :, :columns]
    values = values[:, :, :columns]
    if scores.softcap is None:
        return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scores.scaling)
    capped = (query @ keys.transpose(2, 3) * scores.scaling / scores.softcap).tanh() * scores.softcap
    weights = (capped + visible).softmax(dim=-1, dtype=torch.float32)
    return weights.to(query.dtype) @ values


def _hidden(hidden_RPC: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return the attention mask [R, 1, G * P, C] that hides columns, repeated for the G query heads of a key head."""
    rows, positions, columns = hidden_RPC.shape
    added_RPC = torch.zeros_like(hidden_RPC, dtype=dtype).masked_fill_(hidden_RPC, -torch.inf)
    return added_RPC[:, None, None].expand(-1, -1, groups, -1, -1).reshape(rows, 1, groups * positions, columns)


AttentionInterface.register(ATTENTION, attend)
