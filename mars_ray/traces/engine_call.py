"""The record of one request to an engine, from which its spans are made when it has ended.

In:    the request; its chunks as they arrive; the loss of a replica.
Out:   times, counts and thresholds of each sequence that ended.
Never: keeps a token or a text.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

from mars_ray.engine.chunk import Chunk, FinishReason
from mars_ray.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSequence:
    """One sequence that has ended. Its times before the end follow from the seconds that the engine measured, so
    clocks of several machines need not agree."""

    index: int
    mode: str
    ended_unix_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    forwards: int
    """Number of forwards that produced a token."""
    threshold_low: float
    threshold_high: float
    block: int
    """Largest number of tokens that a forward proposed."""


@dataclass(frozen=True, slots=True)
class ReplicaLoss:
    """The loss of the replica that processed a request, which then went to another replica."""

    name: Literal["retry", "migration"]
    """A retry repeats the request, because nothing was sent to the client. A migration continues a begun stream."""
    unix_s: float


@dataclass(slots=True)
class _Steps:
    low: float
    high: float
    block: int


@dataclass(slots=True)
class EngineCall:
    """One request to an engine."""

    request: Request
    began_unix_s: float = field(default_factory=time.time)
    losses: list[ReplicaLoss] = field(default_factory=list)
    sequences: list[EndedSequence] = field(default_factory=list)
    _steps: dict[int, _Steps] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk that arrives now."""
        steps = self._steps.get(chunk.index)
        if steps is None:
            steps = self._steps[chunk.index] = _Steps(chunk.threshold, chunk.threshold, chunk.masks + 1)
        elif chunk.tokens:
            steps.low = min(steps.low, chunk.threshold)
            steps.high = max(steps.high, chunk.threshold)
            steps.block = max(steps.block, chunk.masks + 1)
        if finished := chunk.finished:
            self.sequences.append(
                EndedSequence(
                    index=chunk.index,
                    mode=self.request.decode.mode.value,
                    ended_unix_s=time.time(),
                    queued_s=finished.queued_s,
                    prefill_s=finished.prefill_s,
                    decode_s=finished.decode_s,
                    reason=finished.reason,
                    prompt_tokens=finished.prompt_tokens,
                    cached_tokens=finished.cached_tokens,
                    tokens=finished.tokens,
                    forwards=finished.forwards,
                    threshold_low=steps.low,
                    threshold_high=steps.high,
                    block=steps.block,
                )
            )

    def lost(self, name: Literal["retry", "migration"]) -> None:
        """Record that the replica was lost just now and that another one continues."""
        self.losses.append(ReplicaLoss(name, time.time()))
