"""Schedule one engine step: how many tokens, drafts and masks of which sequences go through the network.

Classes of service share the slots of the cache (see `waiting_queue`); within one, first come, first served. Sequences
that decode take part in every step; prompts share `max_prefill_tokens` a step, oldest first, so a long prompt cannot
hold the others up (chunked prefill). When the cache is too small for all to grow, the youngest gives its slot back and
waits at the head of its queue, to be computed again.

The scheduler touches no tensor and reads no logit.
"""

import time
from collections import abc
from dataclasses import dataclass, field
from functools import cache

from mars_ray.engine.kv.slot_allocator import SlotAllocator
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.scheduling.waiting_queue import WaitingQueue
from mars_ray.engine.service_class import ServiceClass

DECODE_TOKENS = 16
"""A sequence with no more pending tokens than this is decoding; one with more is reading its prompt."""

WORTH_WAITING_TOKENS = 32
"""A prompt waits for a neighbour that is just now computing at least so many more tokens of its prefix."""


Masks = tuple[int, ...]
"""How many masks stand in a row behind the last token of a sequence, and how many behind each of its drafts."""

MasksFor = abc.Callable[[Sequence], Masks]


@dataclass(slots=True)
class ScheduledSequence:
    """The part of one sequence in a step: `num_tokens` of its pending tokens, then its drafts, then rows of masks."""

    sequence: Sequence
    num_tokens: int
    masks: Masks = (0,)
    has_logits: bool = field(init=False)
    """Whether the last token takes part, so that there are logits to choose the next token from; False for a part of a
    prompt that does not reach its end."""
    num_drafts: int = field(init=False)
    """Drafts that are verified."""
    num_masks: int = field(init=False)
    """Masks of all rows."""
    num_positions: int = field(init=False)
    """Positions that go through the network."""

    def __post_init__(self) -> None:
        # Computed once: the sequence is ahead of this as soon as what the forward gave is committed.
        self.has_logits = self.num_tokens == self.sequence.num_pending_tokens
        self.num_drafts, self.num_masks = len(self.masks) - 1, sum(self.masks)
        self.num_positions = self.num_tokens + self.num_drafts + self.num_masks

    def mask_picks(self, picks: slice, right: int) -> range:
        """Return which of `picks`, that begin at the last token, are the masks behind the first `right` drafts."""
        first = picks.start + 1 + self.num_drafts + sum(self.masks[:right])
        return range(first, first + self.masks[right])

    @property
    def is_decode(self) -> bool:
        """Whether this is as short as the part of a decoding sequence, and no prefill."""
        return self.num_tokens <= DECODE_TOKENS


class Scheduler:
    """The waiting queue and the running sequences."""

    def __init__(
        self,
        slots: SlotAllocator,
        *,
        classes: abc.Sequence[ServiceClass],
        max_waiting_seqs: int,
        max_prefill_tokens: int,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        self._slots, self._max_prefill_tokens, self._clock = slots, max_prefill_tokens, clock
        self.waiting = WaitingQueue(classes, max_waiting_seqs)
        self.running: list[Sequence] = []
        """In order of admission."""
        self.preemptions = 0
        """How often a running sequence had to give its slot back."""

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of a request. Raises `QueueFullError` when there is no place for all of them."""
        for sequence in sequences:
            sequence.added_s = self._clock()
        self.waiting.add(sequences)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended; its slot is free at once."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._slots.free(sequence)

    def schedule(self, masks_for: MasksFor) -> list[ScheduledSequence]:
        """Return the batch of the next step, decoding sequences first; empty when there is nothing to do."""
        masks_for = cache(masks_for)  # each admission asks for all that run
        self._make_room(masks_for)
        budget = self._max_prefill_tokens
        batch: list[ScheduledSequence] = []
        for sequence in self.running:
            if sequence.num_pending_tokens <= DECODE_TOKENS:
                batch.append(_scheduled(sequence, sequence.num_pending_tokens, masks_for))
            elif budget > 0:
                batch.append(_scheduled(sequence, min(sequence.num_pending_tokens, budget), masks_for))
                budget -= batch[-1].num_tokens
        while budget > 0 and self._admit(masks_for):
            sequence = self.running[-1]
            batch.append(_scheduled(sequence, min(sequence.num_pending_tokens, budget), masks_for))
            budget -= batch[-1].num_tokens
        for scheduled in batch:
            self.waiting.served(scheduled.sequence.service_class, scheduled.num_tokens)
        return sorted(batch, key=lambda scheduled: not scheduled.is_decode)

    def _make_room(self, masks_for: MasksFor) -> None:
        """Make the slots wide enough for this step, and preempt the youngest while there are too few such slots."""
        while self.running:
            length = max(_reach(sequence, masks_for) for sequence in self.running)
            if length <= self._slots.width or len(self.running) <= self._slots.slots_at(length):
                self._slots.widen(length)
                return
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.free(sequence)
        # Its slot may serve others before it runs again; whatever is left of it then is found as a shared prefix.
        sequence.num_computed_tokens = 0
        self.waiting.put_back(sequence)
        self.preemptions += 1

    def _admit(self, masks_for: MasksFor) -> bool:
        """Start the waiting sequence whose turn it is, and return whether there was a slot for it."""
        head = self.waiting.next()
        if head is None:
            return False
        length = max(_reach(sequence, masks_for) for sequence in (*self.running, head))
        if len(self.running) >= self._slots.slots_at(length):
            return False
        if len(self.running) == self._slots.num_slots:
            self._slots.narrow(length)
        self._slots.widen(length)
        held, soon = self._slots.shared_prefix(head)
        if soon - held >= WORTH_WAITING_TOKENS:
            return False
        self._slots.allocate(self.waiting.take())
        if head.started_s is None:
            head.started_s = self._clock()
        head.num_cached_tokens = max(head.num_cached_tokens, min(head.num_computed_tokens, head.num_prompt_tokens))
        self.running.append(head)
        return True


def _reach(sequence: Sequence, masks_for: MasksFor) -> int:
    """Return the columns a sequence needs in its slot."""
    return len(sequence.tokens) + len(sequence.draft_tokens) + sum(masks_for(sequence))


def _scheduled(sequence: Sequence, num_tokens: int, masks_for: MasksFor) -> ScheduledSequence:
    if num_tokens < sequence.num_pending_tokens:
        return ScheduledSequence(sequence, num_tokens)
    return ScheduledSequence(sequence, num_tokens, masks_for(sequence))
