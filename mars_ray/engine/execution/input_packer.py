"""Lay out the batch of a step as the index tensors of one forward.

The positions of all sequences are packed end to end. Letters are those of `kv/forward_batch`.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from mars_ray.engine.execution.model_runner import Picks
from mars_ray.engine.kv.forward_batch import ForwardBatch, SlotSpan
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class _Lists:
    """The packed positions of a batch: fields of `ForwardBatch`, as lists."""

    id_N: list[int] = field(default_factory=list)
    slot_N: list[int] = field(default_factory=list)
    position_N: list[int] = field(default_factory=list)
    target_N: list[int] = field(default_factory=list)
    prefix_N: list[int] = field(default_factory=list)
    behind_N: list[int] = field(default_factory=list)
    offset_N: list[int] = field(default_factory=list)
    adapter_N: list[int] = field(default_factory=list)
    pick_M: list[int] = field(default_factory=list)


TENSORS = tuple(lists.name for lists in fields(_Lists))


class InputPacker:
    """Packs batches on `device`, with the mask token `mask_id`.

    `adapter_of` returns the number of the adapter that decodes the masks of a sequence, or -1 if none does.
    """

    def __init__(self, mask_id: int, device: torch.device, adapter_of: Callable[[Sequence], int]) -> None:
        self._mask_id = mask_id
        self._device = device
        self._adapter_of = adapter_of

    @torch.inference_mode()
    def pack(self, batch: list[ScheduledSequence], *, audit: bool) -> tuple[ForwardBatch, list[Picks]]:
        """Return the tensors for `batch`, and which of the M picks belong to each sequence.

        With `audit`, or for a request with log-probabilities, a decoding sequence has picks at all its tokens. So has a
        part of a prompt that is scored; otherwise a part that stops short of the prompt's end has no picks.
        """
        packed = _Lists()
        picks = [self._append(packed, scheduled, audit) for scheduled in batch]
        packed.pick_M = packed.pick_M or [len(packed.id_N) - 1]  # runners read at least one position
        forward_batch = ForwardBatch(
            **self._tensors(packed),
            spans=[span for scheduled in batch for span in self._spans(scheduled)],
            kv_tokens=sum(scheduled.sequence.num_computed_tokens for scheduled in batch),
        )
        return forward_batch, picks

    def _append(self, packed: _Lists, scheduled: ScheduledSequence, audit: bool) -> Picks:
        """Add the positions of a sequence, and return its picks."""
        sequence = scheduled.sequence
        start = len(packed.id_N)
        computed = sequence.num_computed_tokens
        length = scheduled.num_positions
        packed.id_N += sequence.tokens[computed : computed + scheduled.num_tokens]
        if scheduled.has_logits:
            packed.id_N += sequence.drafts.tokens
            packed.id_N += [self._mask_id] * scheduled.num_masks
        masks = [offset for row in scheduled.masks for offset in range(row)]
        packed.offset_N += [-1] * (length - len(masks)) + masks
        packed.adapter_N += [-1] * (length - len(masks)) + [self._adapter_of(sequence)] * len(masks)
        packed.slot_N += [sequence.slot or 0] * length
        packed.target_N += range(computed, computed + length)
        if any(scheduled.masks[:-1]):
            _place_rows(packed, computed, scheduled)
        else:
            packed.position_N += range(computed, computed + length)
            packed.prefix_N += range(computed + 1, computed + length + 1)
            packed.behind_N += [0] * length
        first_pick = len(packed.pick_M)
        if not scheduled.has_logits:
            packed.pick_M += range(start, start + scheduled.num_scored)
            return Picks(range(first_pick, first_pick + scheduled.num_scored))
        audited = scheduled.is_decode and (audit or sequence.request.sampling.logprobs is not None)
        before = scheduled.num_tokens - 1 if audited or scheduled.num_scored else 0
        packed.pick_M += range(start + scheduled.num_tokens - 1 - before, start + length)
        return _picks(scheduled, first_pick, before)

    def _spans(self, scheduled: ScheduledSequence) -> list[SlotSpan]:
        """Return the spans of a sequence.

        Masks that an adapter decodes have a span of their own, because its products may overflow. Attention multiplies
        columns of a span that a position does not see by 0, and 0 times NaN is NaN.
        """
        slot = scheduled.sequence.slot or 0
        positions = scheduled.num_positions
        columns = scheduled.sequence.num_computed_tokens + positions
        masks = scheduled.num_masks
        if not masks or self._adapter_of(scheduled.sequence) < 0:
            return [SlotSpan(slot, positions, columns)]
        return [SlotSpan(slot, positions - masks, columns - masks), SlotSpan(slot, masks, columns)]

    def _tensors(self, packed: _Lists) -> dict[str, Tensor]:
        """Return one tensor per list. All are views of a single tensor, so that one copy moves them to the device."""
        numbers = array("q")
        lengths = []
        for name in TENSORS:
            part: list[int] = getattr(packed, name)
            numbers.fromlist(part)  # an eighth of the time of `torch.tensor` with a list
            lengths.append(len(part))
        joined = torch.tensor(np.frombuffer(numbers, dtype=np.int64), device=self._device)
        return dict(zip(TENSORS, torch.split(joined, lengths), strict=True))


def _picks(scheduled: ScheduledSequence, first: int, before: int) -> Picks:
    """Return the picks of a sequence, the first of which is `first`, with `before` tokens before the last one."""
    last = first + before
    end = last + 1 + scheduled.num_drafts
    rows = [range(end, end := end + count) for count in scheduled.masks]
    return Picks(range(first, last), range(last, last + 1 + scheduled.num_drafts), tuple(rows))


def _place_rows(packed: _Lists, computed: int, scheduled: ScheduledSequence) -> None:
    """Add the positions of a sequence that has a row of masks after its last token and after each draft.

    Tokens and drafts come first in the slot, then the rows end to end. A mask attends to the tokens and drafts before
    its row, and to the masks of its row up to itself.
    """
    length = scheduled.num_tokens + scheduled.num_drafts
    packed.position_N += range(computed, computed + length)
    packed.prefix_N += range(computed + 1, computed + length + 1)
    packed.behind_N += [0] * length
    column = computed + length
    for row, count in enumerate(scheduled.masks):
        prefix = computed + scheduled.num_tokens + row
        gap = column - prefix  # columns between the prefix and the row
        column += count
        packed.position_N += range(prefix, prefix + count)
        packed.prefix_N += [prefix] * count
        packed.behind_N += [((1 << number) - 1) << gap for number in range(1, count + 1)]
