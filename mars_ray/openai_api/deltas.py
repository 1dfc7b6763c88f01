"""Deltas of an answer: what each chunk of the engine adds to one of the numbered choices.

In:    chunks of one sequence, and which choice it is.
Out:   deltas in which tokens, text and log-probabilities belong together.
Never: knows the shape of an API.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mars_ray.engine.chunk import Audit, Chunk, TokenLogprobs

ChoiceFinishReason = Literal["stop", "length"]
"""The finish reasons that OpenAI's API knows and this server gives."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Consecutive tokens of one choice, the text they settled, and how the choice ended if it did."""

    choice: int
    pieces: tuple[str, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: ChoiceFinishReason | None
    audits: tuple[Audit, ...] = ()
    """What one token at a time would have said for tokens before these."""

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(self.pieces)


class LogprobEntry(NamedTuple):
    """The log-probabilities of one token, and where in the text of its choice it stands."""

    token: int
    number: int
    """The number of the token in its choice, from 0."""
    start: int
    """The character of the choice at which the text of the token begins."""
    logprobs: TokenLogprobs


class LogprobBuffer:
    """Holds log-probabilities back until the text of their tokens is sent.

    Text that may become a stop string is held back by the engine; the log-probabilities of its tokens wait with it.
    Tokens without any text, such as special tokens, get no entry.
    """

    def __init__(self) -> None:
        self._sent_chars: defaultdict[int, int] = defaultdict(int)
        """Characters sent of each choice."""
        self._taken: defaultdict[int, int] = defaultdict(int)
        """Tokens taken of each choice."""
        self._waiting: defaultdict[int, list[LogprobEntry]] = defaultdict(list)

    def take(self, delta: OutputDelta) -> list[LogprobEntry]:
        """Return the entries to send together with the text of `delta`."""
        waiting = self._waiting[delta.choice]
        for number, (token, logprobs) in enumerate(
            zip(delta.tokens, delta.logprobs, strict=bool(delta.logprobs)), self._taken[delta.choice]
        ):
            if logprobs.start is not None:
                waiting.append(LogprobEntry(token, number, logprobs.start, logprobs))
        self._taken[delta.choice] += len(delta.tokens)
        self._sent_chars[delta.choice] += len(delta.text)
        ready = [entry for entry in waiting if entry.start < self._sent_chars[delta.choice]]
        del waiting[: len(ready)]
        return ready


def delta_of(chunk: Chunk, choice: int) -> OutputDelta:
    """Return what a chunk adds to choice number `choice`."""
    reason: ChoiceFinishReason | None = None
    if chunk.finished:
        reason = "stop" if chunk.finished.reason == "stop" else "length"
    return OutputDelta(choice, chunk.pieces, chunk.tokens, chunk.logprobs, reason, chunk.audits)


def split_by_token(delta: OutputDelta) -> Iterator[OutputDelta]:
    """Yield one delta for each token of `delta`; the first has the audits, the last the finish reason."""
    # A delta without tokens and text still gives one, for it may carry the finish reason.
    count = max(len(delta.tokens), len(delta.pieces), 1)
    for number in range(count):
        yield OutputDelta(
            delta.choice,
            delta.pieces[number : number + 1],
            delta.tokens[number : number + 1],
            delta.logprobs[number : number + 1],
            delta.finish_reason if number + 1 == count else None,
            () if number else delta.audits,
        )


def concatenate(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Return all deltas of one choice as a single one."""
    return OutputDelta(
        deltas[0].choice,
        tuple(piece for delta in deltas for piece in delta.pieces),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        deltas[-1].finish_reason,
        tuple(each for delta in deltas for each in delta.audits),
    )
