"""Chunks of the engine as parts of numbered choices of a response.

In:    chunks whose index is the number of their choice.
Out:   the reason of its end, parts of one token, whole answers; log-probabilities together with their text.
Never: depends on the response format of a particular API.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal, NamedTuple

from mars_ray.engine.chunk import Chunk, TokenLogprobs
from mars_ray.engine.process.collector import joined_chunk

ChoiceFinishReason = Literal["stop", "length", "tool_calls", "function_call"]
"""The finish reasons of OpenAI's API that this server uses."""


class LogprobEntry(NamedTuple):
    """Log-probabilities of one token, and its position in its choice."""

    token: int
    number: int
    """Index of the token in its choice, from 0."""
    start: int
    """Index of the first character of the token's text within the text of the choice."""
    logprobs: TokenLogprobs


class LogprobBuffer:
    """Holds back log-probabilities until the text of their tokens is sent.

    The engine holds back text that may become a stop string, so the log-probabilities of the tokens in that text must
    wait too. Tokens without text, such as special tokens, get no entry.
    """

    def __init__(self) -> None:
        self._sent_chars: defaultdict[int, int] = defaultdict(int)
        """Number of characters sent, by choice."""
        self._taken: defaultdict[int, int] = defaultdict(int)
        """Number of tokens taken, by choice."""
        self._waiting: defaultdict[int, list[LogprobEntry]] = defaultdict(list)

    def take(self, chunk: Chunk) -> list[LogprobEntry]:
        """Return the entries to send together with the text of `chunk`."""
        waiting = self._waiting[chunk.index]
        for number, (token, logprobs) in enumerate(
            zip(chunk.tokens, chunk.logprobs, strict=bool(chunk.logprobs)), self._taken[chunk.index]
        ):
            if logprobs.start is not None:
                waiting.append(LogprobEntry(token, number, logprobs.start, logprobs))
        self._taken[chunk.index] += len(chunk.tokens)
        self._sent_chars[chunk.index] += len(chunk.text)
        ready = [entry for entry in waiting if entry.start < self._sent_chars[chunk.index]]
        del waiting[: len(ready)]
        return ready


def finish_reason_of(chunk: Chunk) -> ChoiceFinishReason | None:
    """Return why a choice ended; None if the chunk does not end it."""
    if chunk.finished is None:
        return None
    return "stop" if chunk.finished.reason == "stop" else "length"


def split_by_token(chunk: Chunk) -> Iterator[Chunk]:
    """Yield one chunk per token of `chunk`. The first one has the audits, and the last one ends the sequence."""
    # A chunk without tokens or text still yields one chunk, because it may end the sequence.
    count = max(len(chunk.tokens), len(chunk.pieces), 1)
    for number in range(count):
        yield replace(
            chunk,
            pieces=chunk.pieces[number : number + 1],
            tokens=chunk.tokens[number : number + 1],
            logprobs=chunk.logprobs[number : number + 1],
            audits=() if number else chunk.audits,
            finished=chunk.finished if number + 1 == count else None,
        )


def answers_of(chunks: Sequence[Chunk], kept: int, first: int, *, logprobs: bool) -> list[Chunk]:
    """Return the answers to one prompt, as choices from number `first` on.

    If there are more than `kept`, those with the highest mean log-probability of their tokens are returned, best first.
    Without `logprobs`, the log-probabilities served only that choice and are left out.
    """
    parts: defaultdict[int, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        parts[chunk.index].append(chunk)
    answers = [joined_chunk(parts[index]) for index in sorted(parts)]
    scores = answers[0].prompt_logprobs  # the engine scores a prompt once
    if len(answers) > kept:
        answers = sorted(answers, key=_mean_logprob, reverse=True)[:kept]
        answers = [answer if logprobs else replace(answer, logprobs=()) for answer in answers]
    return [replace(answer, index=number, prompt_logprobs=scores) for number, answer in enumerate(answers, start=first)]


def _mean_logprob(answer: Chunk) -> float:
    return fmean(entry.chosen for entry in answer.logprobs) if answer.logprobs else 0.0
