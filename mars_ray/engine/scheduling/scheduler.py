"""Choose the tokens, drafts and masks of each sequence that go through the network in one engine step.

Service classes share the slots of the cache (see `waiting_queue`); within a class, sequences are served in order of
arrival. Decoding sequences take part in every step. Prompts share `max_prefill_tokens` per step, oldest first, so a
long prompt does not delay other sequences (chunked prefill). If the cache is too small for all sequences to grow, the
youngest of the lowest priority is preempted: it returns to the head of its queue and is computed again later.

Sequences of lower priority use what the others leave. They give up their slots to waiting sequences of higher priority.
While sequences of the highest priority run, the others decode and read their prompts in the same steps only as far as
this slows the steps down by at most `SLOWDOWN`; otherwise they keep their slots and pause, and others do not start.
Shortly after such a step they run in short steps, because the next sequence must wait for the end of a step.

The scheduler does not read tensors or logits.
"""

import time
from bisect import bisect_left
from collections import abc, deque
from dataclasses import dataclass, field
from functools import cache

from mars_ray.engine.kv.slot_allocator import SlotAllocator
from mars_ray.engine.scheduling.sequence import Drafts, Sequence
from mars_ray.engine.scheduling.waiting_queue import WaitingQueue
from mars_ray.engine.service_class import ServiceClass

DECODE_TOKENS = 16
"""Maximum number of pending tokens of a decoding sequence. A sequence with more is still reading its prompt."""

MAX_SCORED_TOKENS = 256
"""Maximum number of prompt tokens per step whose log-probabilities are asked for. The logits of one token take 0.6 MB
with a vocabulary of 150,000."""

WORTH_WAITING_TOKENS = 32
"""A prompt waits if another sequence will soon have computed at least this many more tokens of a shared prefix."""

SLOWDOWN = 0.05
"""Share by which sequences of lower priority may lengthen a step of the highest priority."""

NEAR_S = 1.0
"""Seconds after a step of a higher priority in which steps stay short, because its next sequence is probably near and
would wait for the end of a step."""

NEAR_SLOWDOWN = 1.0
"""Maximum slowdown of a step shortly after steps of a higher priority, compared with a step of one sequence."""

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
        step_s: abc.Callable[[list["ScheduledSequence"]], float | None] = lambda _: None,
    ) -> None:
        """Create a scheduler. `step_s` predicts the seconds of a step; None means that they are not known yet."""
        self._slots = slots
        self._step_s = step_s
        self._max_prefill_tokens = max_prefill_tokens
        self._clock = clock
        self.waiting = WaitingQueue(classes, max_waiting_seqs)
        self.running: list[Sequence] = []
        """Running sequences in order of admission."""
        self._ran_s: dict[int, float] = {}
        """Time of the last step with a sequence of each priority."""
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
        self._give_up_drafts(masks_for)
        masks_for = cache(masks_for)  # each admission needs the masks of all running sequences
        self._make_room(masks_for)
        self._make_way(masks_for)
        budget = _PromptBudget(self._max_prefill_tokens)
        head = self.waiting.next()
        highest = max(map(self._priority, self.running if head is None else [*self.running, head]), default=0)
        ordered = sorted(self.running, key=self._priority, reverse=True)
        near = any(priority > highest and self._clock() - ran_s < NEAR_S for priority, ran_s in self._ran_s.items())
        if near and not ordered and self._admit(masks_for, highest):
            ordered = [self.running[-1]]
        leading = ordered[:1] if near else [sequence for sequence in ordered if self._priority(sequence) == highest]
        batch: list[ScheduledSequence] = []
        for sequence in leading:
            pending = sequence.num_pending_tokens
            if count := pending if pending <= DECODE_TOKENS else budget.take(sequence):
                batch.append(_scheduled(sequence, count, masks_for))
        while not near and budget.tokens > 0 and self._admit(masks_for, highest):
            if count := budget.take(self.running[-1]):
                batch.append(_scheduled(self.running[-1], count, masks_for))
        slowdown = NEAR_SLOWDOWN if near else SLOWDOWN
        batch += self._joining(batch, ordered[len(leading) :], budget, masks_for, slowdown)
        for scheduled in batch:
            self._ran_s[self._priority(scheduled.sequence)] = self._clock()
            self.waiting.served(scheduled.sequence.service_class, scheduled.num_tokens)
        return sorted(batch, key=lambda scheduled: not scheduled.is_decode)

    def _give_up_drafts(self, masks_for: MasksFor) -> None:
        """Drop drafts from text if their columns would cost a sequence its slot."""
        drafting = [sequence for sequence in self.running if sequence.drafts.text]
        length = max((_reach(sequence, masks_for) for sequence in drafting), default=0)
        if length > self._slots.width and len(self.running) > self._slots.slots_at(length):
            for sequence in drafting:
                sequence.drafts = Drafts()

    def _make_room(self, masks_for: MasksFor) -> None:
        """Widen the slots for this step, and preempt the youngest sequences until the remaining slots suffice."""
        while self.running:
            length = max(_reach(sequence, masks_for) for sequence in self.running)
            if length <= self._slots.width or len(self.running) <= self._slots.slots_at(length):
                self._slots.widen(length)
                return
            self._preempt(min(reversed(self.running), key=self._priority))

    def _make_way(self, masks_for: MasksFor) -> None:
        """Preempt sequences of lower priority until the next waiting sequence has a slot."""
        while (head := self.waiting.next()) is not None and self.running:
            length = max(_reach(sequence, masks_for) for sequence in (*self.running, head))
            victim = min(reversed(self.running), key=self._priority)
            if len(self.running) < self._slots.slots_at(length) or self._priority(victim) >= self._priority(head):
                return
            self._preempt(victim)

    def _joining(
        self,
        batch: list[ScheduledSequence],
        lower: list[Sequence],
        budget: _PromptBudget,
        masks_for: MasksFor,
        slowdown: float,
    ) -> list[ScheduledSequence]:
        """Return how the running sequences `lower`, and waiting ones, of lower priority join the step `batch`."""
        decoding = [sequence for sequence in lower if sequence.num_pending_tokens <= DECODE_TOKENS]
        joining = [_scheduled(sequence, sequence.num_pending_tokens, masks_for) for sequence in decoding]
        del joining[_largest(len(joining), lambda count: self._fits(batch, joining[:count], slowdown)) :]
        if len(joining) < len(decoding):
            return joining
        prompts = deque(sequence for sequence in lower if sequence.num_pending_tokens > DECODE_TOKENS)
        while prompts or (budget.tokens > 0 and self._admit(masks_for, None)):
            sequence = prompts.popleft() if prompts else self.running[-1]
            wanted = budget.take(sequence)
            fitting = _largest(
                wanted,
                lambda count: self._fits(
                    batch,
                    [*joining, _scheduled(sequence, count, masks_for)],  # noqa: B023
                    slowdown,
                ),
            )
            if fitting:
                joining.append(_scheduled(sequence, fitting, masks_for))
            if fitting < wanted:
                break
        return joining

    def _fits(self, batch: list[ScheduledSequence], lower: list[ScheduledSequence], slowdown: float) -> bool:
        """Return whether sequences may join a step without making it longer by more than `slowdown`."""
        alone_s = self._step_s(batch) if batch else None
        together_s = self._step_s(batch + lower)
        return alone_s is None or together_s is None or together_s <= (1 + slowdown) * alone_s

    def _priority(self, sequence: Sequence) -> int:
        return self.waiting.priority(sequence.service_class)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.free(sequence)
        # Other sequences may overwrite the slot. What is left of it later is found again as a shared prefix.
        sequence.num_computed_tokens = 0
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs.clear()
        self.waiting.put_back(sequence)
        self.preemptions += 1

    def _admit(self, masks_for: MasksFor, least: int | None) -> bool:
        """Start the next waiting sequence if it has a slot and no prefix to wait for, and return whether it started.

        Sequences below the priority `least` do not start.
        """
        head = self.waiting.next()
        if head is None or (least is not None and self._priority(head) < least):
            return False
        length = max(_reach(sequence, masks_for) for sequence in (*self.running, head))
        if len(self.running) >= self._slots.slots_at(length):
            return False
        if len(self.running) == self._slots.num_slots:
            self._slots.narrow(length)
        self._slots.widen(length)
        # A sequence of lower priority may pause, so the head does not wait for the prefix that it reads.
        pausing = [sequence for sequence in self.running if self._priority(sequence) < self._priority(head)]
        held, soon = self._slots.shared_prefix(head, pausing)
        if soon - held >= WORTH_WAITING_TOKENS:
            return False
        self._slots.allocate(self.waiting.take())
        if head.started_s is None:
            head.started_s = self._clock()
            head.num_cached_tokens = min(head.num_computed_tokens, head.num_prompt_tokens)
        self.running.append(head)
        return True


def _largest(count: int, fits: abc.Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `count` that fits, or 0. Smaller numbers than one that fits must fit."""
    return bisect_left(range(1, count + 1), True, key=lambda number: not fits(number))


def _reach(sequence: Sequence, masks_for: MasksFor) -> int:
    """Return the number of columns that a sequence needs in its slot."""
    return len(sequence.tokens) + len(sequence.drafts.tokens) + sum(masks_for(sequence))


def _scheduled(sequence: Sequence, num_tokens: int, masks_for: MasksFor) -> ScheduledSequence:
    if num_tokens < sequence.num_pending_tokens:
        return ScheduledSequence(sequence, num_tokens)
    return ScheduledSequence(sequence, num_tokens, masks_for(sequence))
