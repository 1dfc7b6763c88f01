"""Choose the tokens, drafts and masks of each sequence that go through the network in one engine step.

Service classes share the slots of the cache (see `waiting_queue`); within a class, sequences are served in order of
arrival. Decoding sequences take part in every step. Prompts share `max_prefill_tokens` per step, oldest first, so a
long prompt does not delay other sequences (chunked prefill). If the cache is too small for all sequences to grow, the
youngest is preempted: it returns to the head of its queue and is computed again later.

The scheduler does not read tensors or logits.
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
"""Maximum number of pending tokens of a decoding sequence. A sequence with more is still reading its prompt."""

MAX_SCORED_TOKENS = 256
"""Maximum number of prompt tokens per step whose log-probabilities are asked for. The logits of one token take 0.6 MB
with a vocabulary of 150,000."""

WORTH_WAITING_TOKENS = 32
"""A prompt waits if another sequence will soon have computed at least this many more tokens of a shared prefix."""

Masks = tuple[int, ...]
"""Number of masks after the last token of a sequence, and after each of its drafts."""

MasksFor = abc.Callable[[Sequence], Masks]


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence in a step: `num_tokens` of its pending tokens, then its drafts, then rows of masks."""

    sequence: Sequence
    num_tokens: int
    masks: Masks = (0,)
    has_logits: bool = field(init=False)
    """Whether the step includes the last token, so that its logits choose the next token. False for a part of a prompt
    that stops short of the prompt's end."""
    num_drafts: int = field(init=False)
    """Number of drafts to verify."""
    num_masks: int = field(init=False)
    """Number of masks in all rows."""
    num_positions: int = field(init=False)
    """Number of positions that go through the network."""
    num_scored: int = field(init=False)
    """Number of the first positions whose logits give the log-probability of the next token of the prompt."""

    def __post_init__(self) -> None:
        # Computed here, because the sequence changes when the output of the forward is committed.
        self.has_logits = self.num_tokens == self.sequence.num_pending_tokens
        self.num_drafts = len(self.masks) - 1
        self.num_masks = sum(self.masks)
        self.num_positions = self.num_tokens + self.num_drafts + self.num_masks
        self.num_scored = 0
        if self.sequence.prompt_logprobs is not None:
            self.num_scored = min(
                self.num_tokens, self.sequence.num_prompt_tokens - 1 - self.sequence.num_computed_tokens
            )

    def mask_picks(self, picks: slice, drafts: int) -> range:
        """Return the picks of the masks after the first `drafts` drafts. `picks` must begin at the last token."""
        first = picks.start + 1 + self.num_drafts + sum(self.masks[:drafts])
        return range(first, first + self.masks[drafts])

    @property
    def is_decode(self) -> bool:
        """Whether the sequence is decoding rather than reading a part of its prompt."""
        return self.num_tokens <= DECODE_TOKENS


@dataclass(slots=True)
class _PromptBudget:
    """Number of prompt tokens that the step can still read, and of those that it can still score."""

    tokens: int
    scored: int = MAX_SCORED_TOKENS

    def take(self, sequence: Sequence) -> int:
        """Return how many pending tokens of a sequence the step reads."""
        scores = sequence.prompt_logprobs is not None
        count = min(sequence.num_pending_tokens, self.tokens, self.scored if scores else self.tokens)
        self.tokens -= count
        self.scored -= count * scores
        return count


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
        self._slots = slots
        self._max_prefill_tokens = max_prefill_tokens
        self._clock = clock
        self.waiting = WaitingQueue(classes, max_waiting_seqs)
        self.running: list[Sequence] = []
        """Running sequences in order of admission."""
        self.preemptions = 0
        """Number of preemptions so far."""

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of a request. Raises the errors of `WaitingQueue.add`."""
        for sequence in sequences:
            sequence.added_s = self._clock()
        self.waiting.add(sequences)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, and free its slot."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._slots.free(sequence)

    def schedule(self, masks_for: MasksFor) -> list[ScheduledSequence]:
        """Return the batch of the next step, decoding sequences first. It is empty if there is nothing to do."""
        masks_for = cache(masks_for)  # each admission needs the masks of all running sequences
        self._make_room(masks_for)
        budget = _PromptBudget(self._max_prefill_tokens)
        batch: list[ScheduledSequence] = []
        for sequence in self.running:
            pending = sequence.num_pending_tokens
            if count := pending if pending <= DECODE_TOKENS else budget.take(sequence):
                batch.append(_scheduled(sequence, count, masks_for))
        while budget.tokens > 0 and self._admit(masks_for):
            sequence = self.running[-1]
            if count := budget.take(sequence):
                batch.append(_scheduled(sequence, count, masks_for))
        for scheduled in batch:
            self.waiting.served(scheduled.sequence.service_class, scheduled.num_tokens)
        return sorted(batch, key=lambda scheduled: not scheduled.is_decode)

    def _make_room(self, masks_for: MasksFor) -> None:
        """Widen the slots for this step, and preempt the youngest sequences until the remaining slots suffice."""
        while self.running:
            length = max(_reach(sequence, masks_for) for sequence in self.running)
            if length <= self._slots.width or len(self.running) <= self._slots.slots_at(length):
                self._slots.widen(length)
                return
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.free(sequence)
        # Other sequences may overwrite the slot. What is left of it later is found again as a shared prefix.
        sequence.num_computed_tokens = 0
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs.clear()
        self.waiting.put_back(sequence)
        self.preemptions += 1

    def _admit(self, masks_for: MasksFor) -> bool:
        """Start the next waiting sequence if it has a slot and no prefix to wait for, and return whether it started."""
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
    """Return the number of columns that a sequence needs in its slot."""
    return len(sequence.tokens) + len(sequence.draft_tokens) + sum(masks_for(sequence))


def _scheduled(sequence: Sequence, num_tokens: int, masks_for: MasksFor) -> ScheduledSequence:
    if num_tokens < sequence.num_pending_tokens:
        return ScheduledSequence(sequence, num_tokens)
    return ScheduledSequence(sequence, num_tokens, masks_for(sequence))
