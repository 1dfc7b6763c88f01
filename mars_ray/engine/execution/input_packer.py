"""Lay out the batch of a step as the index tensors of one forward.

The positions of all sequences are packed end to end, so padding costs nothing but filler cells in attention. Letters
are those of `kv/forward_batch`.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mars_ray.engine.kv.forward_batch import ForwardBatch, PrefillBatch
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class _Lists:
    """The packed positions of a batch; the fields are those of `ForwardBatch`, as lists."""

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
    """Range of `picks` that belongs to each sequence."""
    reaches: list[int] = field(default_factory=list)
    """Number of columns that each sequence needs in its slot."""


class InputPacker:
    """Packs batches on `device`, with sequences of up to `max_model_len` tokens and the mask token `mask_id`.

    `adapter_of` returns the number of the adapter that decodes the masks of a sequence, or -1 if none does.
    """

    def __init__(
        self, mask_id: int, max_model_len: int, device: torch.device, adapter_of: Callable[[Sequence], int]
    ) -> None:
        self._mask_id = mask_id
        self._device = device
        self._adapter_of = adapter_of
        with torch.inference_mode():
            self._columns = torch.arange(max_model_len, device=device)

    @torch.inference_mode()
    def pack(self, batch: list[ScheduledSequence], rows: int, *, audit: bool) -> tuple[ForwardBatch, list[slice]]:
        """Return the tensors for `batch`, and the slice of the M picks that belongs to each sequence.

        `batch` begins with the decoding sequences; `rows` is the number of active slots. Prompts get a second
        rectangle if they would make the first one much wider.

        The picks of a sequence begin at its last token. With `audit`, or for a request with log-probabilities, a
        decoding sequence has picks at all its tokens. A part of a prompt has picks at all its tokens if it is scored;
        otherwise a part that stops short of the prompt's end has no picks.
        """
        packed = self._lists(batch, audit)
        slots = [scheduled.sequence.slot or 0 for scheduled in batch]
        first = _in_first_rectangle(batch, rows)
        width, cells, back = _layout(batch[:first], slots[:first], rows, 0, 0)
        prefill = None
        if first < len(batch):
            count = len(batch) - first
            longest, prefill_cells, prefill_back = _layout(
                batch[first:], list(range(count)), count, len(back), len(cells)
            )
            back += prefill_back
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
            sequence = scheduled.sequence
            start = len(packed.ids)
            first_pick = len(packed.picks)
            computed = sequence.num_computed_tokens
            packed.ids += sequence.tokens[computed : computed + scheduled.num_tokens]
            if scheduled.has_logits:
                audited = scheduled.is_decode and (audit or sequence.request.sampling.logprobs is not None)
                first = start if audited or scheduled.num_scored else len(packed.ids) - 1
                packed.ids += sequence.draft_tokens
                packed.ids += [self._mask_id] * scheduled.num_masks
                packed.picks += range(first, len(packed.ids))
            elif scheduled.num_scored:
                packed.picks += range(start, start + scheduled.num_scored)
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
            packed.slices.append(slice(first_pick, len(packed.picks)))
        if len(packed.picks) < 2:
            # Read at least two logits: a compiled step with several positions accepts any number of picks except 1.
            packed.picks = (packed.picks or [len(packed.ids) - 1]) * min(2, len(packed.ids))
        return packed

    def _tensors(self, *lists: list[int]) -> tuple[Tensor, ...]:
        """Return one tensor per list. All are views of a single tensor, so that one copy moves them to the device."""
        numbers = array("q")
        for part in lists:
            numbers.fromlist(part)  # an eighth of the time of `torch.tensor` with a list
        joined = torch.tensor(np.frombuffer(numbers, dtype=np.int64), device=self._device)
        tensors: tuple[Tensor, ...] = torch.split(joined, [len(part) for part in lists])
        return tensors


def _place_rows(packed: _Lists, computed: int, scheduled: ScheduledSequence) -> None:
    """Add the positions of a sequence that has a row of masks after its last token and after each draft.

    Tokens and drafts come first in the slot, then the rows end to end. A mask attends to the tokens and drafts before
    its row, and to the masks of its row up to itself.
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
    """Return the number of sequences in the first rectangle: all if they fill half of it, else the decoding ones."""
    lengths = [scheduled.num_positions for scheduled in batch]
    if 2 * sum(lengths) >= rows * max(lengths):
        return len(batch)
    return sum(scheduled.is_decode for scheduled in batch)


def _layout(
    batch: list[ScheduledSequence], row_of: list[int], rows: int, start: int, begin: int
) -> tuple[int, list[int], list[int]]:
    """Lay out packed positions, the first of which is `start`, in a rectangle of `rows` rows.

    The sequence `batch[b]` takes the row `row_of[b]`. Returns the width of the rectangle, the packed position in each
    cell, and the cell of each packed position, counted from `begin`. Filler cells name position 0, which always exists;
    the attention output of fillers is never read.
    """
    width = max((scheduled.num_positions for scheduled in batch), default=1)
    where = [0] * (rows * width)
    back: list[int] = []
    for scheduled, row in zip(batch, row_of, strict=True):
        cell = row * width
        length = scheduled.num_positions
        where[cell : cell + length] = range(start, start + length)
        back += range(begin + cell, begin + cell + length)
        start += length
    return width, where, back
