"""Feeds -> the index tensors of one forward.

In:    who is fed what, in which rows.
Out:   ids and indices; for each feed, where its logits will be.
Never: runs the network, pads a position: what is not fed costs nothing but a filler in attention.

Letters as in `attention`, and M positions whose logits are read.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mars_ray.engine.attention import Prompts
from mars_ray.engine.scheduler import Feed

Indices = NDArray[np.int64]


@dataclass(slots=True)
class Packed:
    """What a forward takes."""

    id_N: Tensor
    row_N: Tensor
    position_N: Tensor
    back_N: Tensor
    where_RP: Tensor
    column_C: Tensor
    pick_M: Tensor
    prompts: Prompts | None
    kv_tokens: int
    """Tokens attended to, summed over the sequences."""


@torch.inference_mode()
def pack(
    feeds: list[Feed], rows: int, *, mask_id: int, audit: bool, device: torch.device
) -> tuple[Packed, list[slice]]:
    """Lay out `feeds`; `rows` is the number of active rows.

    Logits are read from the last token on, or, to `audit`, from every token of a short feed; the slices say
    where in M those of each feed are. They are empty for a part of a prompt.
    """
    ids: list[int] = []
    picks: list[int] = []
    slices: list[slice] = []
    for feed in feeds:
        sequence, start = feed.sequence, len(ids)
        ids += sequence.tokens[sequence.cached : sequence.cached + feed.count]
        if feed.complete:
            first = start if audit and feed.short else len(ids) - 1
            ids += sequence.drafts
            ids += [mask_id] * feed.masks
            slices.append(slice(len(picks), len(picks) + len(ids) - first))
            picks += range(first, len(ids))
        else:
            slices.append(slice(len(picks), len(picks)))
    if len(picks) < 2:
        # Some logits are always read. A compiled step takes any number of them but 1, unless it has but one position.
        picks = (picks or [len(ids) - 1]) * min(2, len(ids))

    length_F = np.array([feed.length for feed in feeds])
    row_F = np.array([feed.sequence.row for feed in feeds])
    cached_F = np.array([feed.sequence.cached for feed in feeds])
    start_F = np.cumsum(length_F) - length_F
    offset_N = np.arange(len(ids)) - np.repeat(start_F, length_F)
    short = sum(feed.short for feed in feeds)  # they stand first
    where_RP, back_N = _layout(row_F[:short], start_F[:short], length_F[:short], rows)
    prompts = None
    if short < len(feeds):
        place_L = np.arange(len(feeds) - short)
        where_LQ, behind_N = _layout(place_L, start_F[short:], length_F[short:], len(place_L))
        back_N = np.concatenate([back_N, where_RP.size + behind_N])
        reach = int((cached_F + length_F)[short:].max())
        prompts = Prompts(*(_tensor(each, device) for each in (where_LQ, row_F[short:], np.arange(reach))))
    reach = int((cached_F + length_F)[:short].max(initial=2))
    packed = Packed(
        id_N=_tensor(np.array(ids), device),
        row_N=_tensor(np.repeat(row_F, length_F), device),
        position_N=_tensor(np.repeat(cached_F, length_F) + offset_N, device),
        back_N=_tensor(back_N, device),
        where_RP=_tensor(where_RP, device),
        column_C=_tensor(np.arange(reach), device),
        pick_M=_tensor(np.array(picks), device),
        prompts=prompts,
        kv_tokens=int((cached_F + length_F).sum()),
    )
    return packed, slices


def _layout(row_F: Indices, start_F: Indices, length_F: Indices, rows: int) -> tuple[Indices, Indices]:
    """Return which packed position stands where in a rectangle, and where in it each packed position stands.

    Fillers name a position that exists; what attention makes of them is not read.
    """
    width = int(length_F.max(initial=1))
    where_RP = np.zeros((rows, width), dtype=np.int64)
    where_RP[row_F] = start_F[:, None] + np.minimum(np.arange(width), length_F[:, None] - 1)
    offset_N = np.arange(length_F.sum()) - np.repeat(np.cumsum(length_F) - length_F, length_F)
    return where_RP, np.repeat(row_F * width, length_F) + offset_N


def _tensor(values: Indices, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
