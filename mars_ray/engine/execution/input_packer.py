"""Lay out the batch of a step as the index tensors of one forward.

Positions of all sequences are packed one behind the other, without padding: what takes no part costs nothing but a
filler in attention. Letters are those of `attention`, and M are the positions whose logits are read, the picks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mars_ray.engine.kv.forward_batch import ForwardBatch, PrefillBatch
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class _Lists:
    """The packed positions of a batch, as lists."""

    ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)
    picks: list[int] = field(default_factory=list)
    slices: list[slice] = field(default_factory=list)
    """Where in `picks` those of each sequence are."""
    reaches: list[int] = field(default_factory=list)
    """Columns each sequence needs in its slot."""


class InputPacker:
    """Packs for a network with the mask token `mask_id`, on `device`, for sequences up to `max_model_len` tokens.

    `adapter_of` tells which adapter decodes the masks of a sequence, -1 for none.
    """

    def __init__(
        self, mask_id: int, max_model_len: int, device: torch.device, adapter_of: Callable[[Sequence], int]
    ) -> None:
        self._mask_id, self._device, self._adapter_of = mask_id, device, adapter_of
        with torch.inference_mode():
            self._columns = torch.arange(max_model_len, device=device)

    @torch.inference_mode()
    def pack(self, batch: list[ScheduledSequence], rows: int, *, audit: bool) -> tuple[ForwardBatch, list[slice]]:
        """Lay out `batch`, decoding sequences first; `rows` is the number of active slots.

        Prompts get a rectangle of their own where they would stretch that of the decoding sequences.

        Logits are read from the last token on, or, to `audit` and where log-probabilities are asked for, from every
        token of a decoding sequence; the slices say where in M those of each sequence are. They are empty for a part of
        a prompt.
        """
        packed = self._lists(batch, audit)
        slots = [scheduled.sequence.slot or 0 for scheduled in batch]
        first = _in_first_rectangle(batch, rows)
        width, cells, back = _layout(batch[:first], slots[:first], rows, 0, 0)
        prefill = None
        if first < len(batch):
            count = len(batch) - first
            longest, prefill_cells, behind = _layout(batch[first:], list(range(count)), count, len(back), len(cells))
            back += behind
            where, slot_L = self._tensors(prefill_cells, slots[first:])
            prefill = PrefillBatch(where.view(count, longest), slot_L, self._columns[: max(packed.reaches[first:])])
        id_N, slot_N, position_N, target_N, prefix_N, behind_N, offset_N, adapter_N, back_N, pick_M, where = (
            self._tensors(
                packed.ids,
                packed.slots,
                packed.positions,
                packed.targets,
                packed.prefixes,
                packed.behind,
                packed.offsets,
                packed.adapters,
                back,
                packed.picks,
                cells,
            )
        )
        forward_batch = ForwardBatch(
            id_N=id_N,
            slot_N=slot_N,
            position_N=position_N,
            target_N=target_N,
            prefix_N=prefix_N,
            behind_N=behind_N,
            offset_N=offset_N,
            adapter_N=adapter_N,
            back_N=back_N,
            pick_M=pick_M,
            where_RP=where.view(rows, width),
            column_C=self._columns[: max(packed.reaches[:first], default=2)],
            prefill=prefill,
            kv_tokens=sum(scheduled.sequence.num_computed_tokens for scheduled in batch),
        )
        return forward_batch, packed.slices

    def _lists(self, batch: list[ScheduledSequence], audit: bool) -> _Lists:
        packed = _Lists()
        for scheduled in batch:
            sequence, start, picked = scheduled.sequence, len(packed.ids), len(packed.picks)
            computed = sequence.num_computed_tokens
            packed.ids += sequence.tokens[computed : computed + scheduled.num_tokens]
            if scheduled.has_logits:
                audited = scheduled.is_decode and (audit or sequence.request.sampling.logprobs is not None)
                first = start if audited else len(packed.ids) - 1
                packed.ids += sequence.draft_tokens
                packed.ids += [self._mask_id] * scheduled.num_masks
                packed.picks += range(first, len(packed.ids))
            length = len(packed.ids) - start
            masks = [offset for row in scheduled.masks for offset in range(row)]
            packed.offsets += [-1] * (length - len(masks)) + masks
            packed.adapters += [-1] * (length - len(masks)) + [self._adapter_of(sequence)] * len(masks)
            packed.slots += [sequence.slot or 0] * length
            packed.targets += range(computed, computed + length)
            packed.reaches.append(computed + length)
            if any(scheduled.masks[:-1]):
                _place_rows(packed, computed, scheduled)
            else:
                packed.positions += range(computed, computed + length)
                packed.prefixes += range(computed + 1, computed + length + 1)
                packed.behind += [0] * length
            packed.slices.append(slice(picked, len(packed.picks)))
        if len(packed.picks) < 2:
            # Some logits are always read. A compiled step takes any number but 1, unless it has but one position.
            packed.picks = (packed.picks or [len(packed.ids) - 1]) * min(2, len(packed.ids))
        return packed

    def _tensors(self, *lists: list[int]) -> tuple[Tensor, ...]:
        """Return one tensor for each list, all of them parts of one that is copied to the device at once."""
        together = torch.tensor([each for part in lists for each in part], device=self._device)
        parts: tuple[Tensor, ...] = torch.split(together, [len(part) for part in lists])
        return parts


def _place_rows(packed: _Lists, computed: int, scheduled: ScheduledSequence) -> None:
    """Place tokens and drafts one behind the other, and behind the last token and each draft a row of masks.

    The rows lie behind one another in the slot. A mask attends to what its row stands behind, and to its own row.
    """
    length = scheduled.num_tokens + scheduled.num_drafts
    packed.positions += range(computed, computed + length)
    packed.prefixes += range(computed + 1, computed + length + 1)
    packed.behind += [0] * length
    column = computed + length
    for row, count in enumerate(scheduled.masks):
        prefix = computed + scheduled.num_tokens + row
        gap = column - prefix  # columns between the prefix and the row
        column += count
        packed.positions += range(prefix, prefix + count)
        packed.prefixes += [prefix] * count
        packed.behind += [((1 << number) - 1) << gap for number in range(1, count + 1)]


def _in_first_rectangle(batch: list[ScheduledSequence], rows: int) -> int:
    """Return how many share the first rectangle: the decoding sequences, or all when that wastes little of it."""
    lengths = [scheduled.num_positions for scheduled in batch]
    if 2 * sum(lengths) >= rows * max(lengths):
        return len(batch)
    return sum(scheduled.is_decode for scheduled in batch)


def _layout(
    batch: list[ScheduledSequence], row_of: list[int], rows: int, start: int, begin: int
) -> tuple[int, list[int], list[int]]:
    """Lay out the packed positions from `start` on in a rectangle of `rows` rows, sequence b in the row `row_of[b]`.

    Returns its width; which packed position stands where in it, fillers naming position 0, which exists and what
    attention makes of which is not read there; and where each packed position stands, counted from `begin`.
    """
    width = max((scheduled.num_positions for scheduled in batch), default=1)
    where = [0] * (rows * width)
    back: list[int] = []
    for scheduled, row in zip(batch, row_of, strict=True):
        cell, length = row * width, scheduled.num_positions
        where[cell : cell + length] = range(start, start + length)
        back += range(begin + cell, begin + cell + length)
        start += length
    return width, where, back
