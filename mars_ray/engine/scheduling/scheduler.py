"""Plan one engine step: who is fed what.

In:    waiting and running sequences, the rows of the cache, how many masks each wants.
Out:   a feed for every sequence that takes part in the step.
Never: touches a tensor, reads a logit.

Classes of service share the rows (see `waiting`); within one, first come, first served. Sequences that decode are fed
in every step; prompts share `prefill_tokens` a step, oldest first, so a long prompt cannot hold the others up. When the
cache is too small for all to grow, the youngest gives its row back and waits at the head of its queue, to be computed
again.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import cache

from mars_ray.engine.kv.slots import KVRows
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.scheduling.waiting_queue import Waiting
from mars_ray.engine.service_class import ServiceClass

DECODE_TOKENS = 16
"""A sequence with no more tokens to feed than this is decoding; one with more is reading its prompt."""

WORTH_WAITING_TOKENS = 32
"""A prompt waits for a neighbour that is just now computing at least so many more tokens of its prefix."""


@dataclass(slots=True)
class Feed:
    """What one sequence feeds: `count` of its tokens from `cached` on, then its drafts, then masks."""

    sequence: Sequence
    count: int
    drafts: int = 0
    masks: int = 0
    complete: bool = field(init=False)
    """Whether the last token is among them, so that there are logits to read."""

    def __post_init__(self) -> None:
        # Of this feed for good: the sequence is ahead of it as soon as what the forward gave is committed.
        self.complete = self.count == self.sequence.pending

    @property
    def length(self) -> int:
        """Positions fed."""
        return self.count + self.drafts + self.masks

    @property
    def short(self) -> bool:
        """Whether it is no longer than the feeds of decoding sequences are."""
        return self.count <= DECODE_TOKENS


class Scheduler:
    """Owns the queue and the running set. `masks_for(sequence)` says how many masks it wants in the next step."""

    def __init__(
        self,
        rows: KVRows,
        *,
        classes: List[ServiceClass],
        queue_max: int,
        prefill_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rows, self._prefill_tokens, self._clock = rows, prefill_tokens, clock
        self.waiting = Waiting(classes, queue_max)
        self.running: list[Sequence] = []
        """In order of admission."""
        self.preemptions = 0

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of a request. Raises `QueueFullError` when there is no place for all of them."""
        for sequence in sequences:
            sequence.added_s = self._clock()
        self.waiting.add(sequences)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended; its row is free at once."""
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._rows.release(sequence)

    def plan(self, masks_for: Callable[[Sequence], int]) -> list[Feed]:
        """Return the feeds of the next step, short ones first; empty when there is nothing to do."""
        masks_for = cache(masks_for)  # each admission asks for all that run
        self._reserve(masks_for)
        budget = self._prefill_tokens
        feeds: list[Feed] = []
        for sequence in self.running:
            if sequence.pending <= DECODE_TOKENS:
                feeds.append(_feed(sequence, sequence.pending, masks_for))
            elif budget > 0:
                feeds.append(_feed(sequence, min(sequence.pending, budget), masks_for))
                budget -= feeds[-1].count
        while budget > 0 and self._admit(masks_for):
            sequence = self.running[-1]
            feeds.append(_feed(sequence, min(sequence.pending, budget), masks_for))
            budget -= feeds[-1].count
        for feed in feeds:
            self.waiting.served(feed.sequence.service_class, feed.count)
        return sorted(feeds, key=lambda feed: not feed.short)

    def _reserve(self, masks_for: Callable[[Sequence], int]) -> None:
        """Make the rows wide enough for this step, and preempt the youngest while there are too few such rows."""
        while self.running:
            length = max(_reach(sequence, masks_for) for sequence in self.running)
            if length <= self._rows.width or len(self.running) <= self._rows.rows_at(length):
                self._rows.widen(length)
                return
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._rows.release(sequence)
        # Its row may serve others before it runs again; whatever is left of it then is found as a shared prefix.
        sequence.cached = 0
        self.waiting.put_back(sequence)
        self.preemptions += 1

    def _admit(self, masks_for: Callable[[Sequence], int]) -> bool:
        """Start the waiting sequence whose turn it is, if there is a row for it."""
        head = self.waiting.next()
        if head is None:
            return False
        length = max(_reach(sequence, masks_for) for sequence in (*self.running, head))
        if len(self.running) >= self._rows.rows_at(length):
            return False
        if len(self.running) == self._rows.rows:
            self._rows.narrow(length)
        self._rows.widen(length)
        held, soon = self._rows.shared(head)
        if soon - held >= WORTH_WAITING_TOKENS:
            return False
        self._rows.acquire(self.waiting.take())
        if head.started_s is None:
            head.started_s = self._clock()
        head.prefix_hit = max(head.prefix_hit, min(head.cached, head.prompt_length))
        self.running.append(head)
        return True


def _reach(sequence: Sequence, masks_for: Callable[[Sequence], int]) -> int:
    return len(sequence.tokens) + len(sequence.drafts) + masks_for(sequence)


def _feed(sequence: Sequence, count: int, masks_for: Callable[[Sequence], int]) -> Feed:
    if count < sequence.pending:
        return Feed(sequence, count)
    return Feed(sequence, count, len(sequence.drafts), masks_for(sequence))
