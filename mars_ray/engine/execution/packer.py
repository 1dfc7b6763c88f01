"""Feeds -> the index tensors of one forward.

In:    who is fed what, in which rows.
Out:   ids and indices; for each feed, where its logits will be.
Never: runs the network, pads a position: what is not fed costs nothing but a filler in attention.

Letters as in `attention`, and M positions whose logits are read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mars_ray.engine.kv.attention import Prompts
from mars_ray.engine.scheduling.scheduler import Feed


@dataclass(slots=True)
class Packed:
    """What a forward takes."""

    id_N: Tensor
    row_N: Tensor
    position_N: Tensor
    back_N: Tensor
    pick_M: Tensor
    where_RP: Tensor
    column_C: Tensor
    prompts: Prompts | None
    kv_tokens: int
    """Tokens in the cache that are attended to, summed over the sequences; what is fed is counted by its positions, or
    a fit of step times could not tell the two apart."""


class Packer:
    """Packs for a network with the mask token `mask_id`, on `device`, for sequences up to `longest` tokens."""

    def __init__(self, mask_id: int, longest: int, device: torch.device) -> None:
        self._mask_id, self._device = mask_id, device
        with torch.inference_mode():
            self._columns = torch.arange(longest, device=device)

    @torch.inference_mode()
    def pack(self, feeds: list[Feed], rows: int, *, audit: bool) -> tuple[Packed, list[slice]]:
        """Lay out `feeds`, the short ones first; `rows` is the number of active rows.

        Prompts get a rectangle of their own where they would stretch that of the short feeds.

        Logits are read from the last token on, or, to `audit`, from every token of a short feed; the slices say where
        in M those of each feed are. They are empty for a part of a prompt.
        """
        ids: list[int] = []
        row_of: list[int] = []
        positions: list[int] = []
        picks: list[int] = []
        slices: list[slice] = []
        reaches: list[int] = []
        for feed in feeds:
            sequence, start, picked = feed.sequence, len(ids), len(picks)
            cached = sequence.cached
            ids += sequence.tokens[cached : cached + feed.count]
            if feed.complete:
                first = start if audit and feed.short else len(ids) - 1
                ids += sequence.drafts
                ids += [self._mask_id] * feed.masks
                picks += range(first, len(ids))
            length = len(ids) - start
            row_of += [sequence.row or 0] * length
            positions += range(cached, cached + length)
            reaches.append(cached + length)
            slices.append(slice(picked, len(picks)))
        if len(picks) < 2:
            # Some logits are always read. A compiled step takes any number but 1, unless it has but one position.
            picks = (picks or [len(ids) - 1]) * min(2, len(ids))

        short = _in_one_rectangle(feeds, rows)
        width, cells, back = _layout(feeds[:short], [feed.sequence.row or 0 for feed in feeds[:short]], rows, 0, 0)
        prompts = None
        if short < len(feeds):
            count = len(feeds) - short
            longest, prompt_cells, behind = _layout(feeds[short:], list(range(count)), count, len(back), len(cells))
            back += behind
            prompt_where, which = self._tensors(prompt_cells, [feed.sequence.row or 0 for feed in feeds[short:]])
            prompts = Prompts(prompt_where.view(count, longest), which, self._columns[: max(reaches[short:])])
        id_N, row_N, position_N, back_N, pick_M, where = self._tensors(ids, row_of, positions, back, picks, cells)
        packed = Packed(
            id_N=id_N,
            row_N=row_N,
            position_N=position_N,
            back_N=back_N,
            pick_M=pick_M,
            where_RP=where.view(rows, width),
            column_C=self._columns[: max(reaches[:short], default=2)],
            prompts=prompts,
            kv_tokens=sum(feed.sequence.cached for feed in feeds),
        )
        return packed, slices

    def _tensors(self, *lists: list[int]) -> tuple[Tensor, ...]:
        """Return one tensor for each list, all of them parts of one that is copied to the device at once."""
        together = torch.tensor([each for part in lists for each in part], device=self._device)
        parts: tuple[Tensor, ...] = torch.split(together, [len(part) for part in lists])
        return parts


def _in_one_rectangle(feeds: list[Feed], rows: int) -> int:
    """Return how many of the feeds share the first rectangle: the short ones, or all when that wastes little of it."""
    lengths = [feed.length for feed in feeds]
    if 2 * sum(lengths) >= rows * max(lengths):
        return len(feeds)
    return sum(feed.short for feed in feeds)


def _layout(
    feeds: list[Feed], place_F: list[int], rows: int, start: int, begin: int
) -> tuple[int, list[int], list[int]]:
    """Lay out the packed positions from `start` on in a rectangle of `rows` rows, feed f in the row `place_F[f]`.

    Returns its width; which packed position stands where in it, fillers naming position 0, which exists and what
    attention makes of which is not read there; and where each packed position stands, counted from `begin`.
    """
    width = max((feed.length for feed in feeds), default=1)
    where = [0] * (rows * width)
    back: list[int] = []
    for feed, place in zip(feeds, place_F, strict=True):
        cell, length = place * width, feed.length
        where[cell : cell + length] = range(start, start + length)
        back += range(begin + cell, begin + cell + length)
        start += length
    return width, where, back
