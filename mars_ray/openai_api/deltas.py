"""Deltas of an answer: what each chunk from the engine adds to one of the numbered choices.

In:    chunks of one sequence, and the number of its choice.
Out:   deltas in which tokens, text and log-probabilities belong together.
Never: depends on the response format of a particular API.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from mars_ray.engine.chunk import Audit, Chunk, TokenLogprobs

ChoiceFinishReason = Literal["stop", "length", "tool_calls", "function_call"]
"""The finish reasons of OpenAI's API that this server uses."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Consecutive tokens of one choice, the text that they completed, and the finish reason if the choice has ended."""

    choice: int
    pieces: tuple[str, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: ChoiceFinishReason | None
    audits: tuple[Audit, ...] = ()
    """Autoregressive choices for earlier tokens that were accepted at masks."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, if the request asked for them."""

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(self.pieces)


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
    """Return the delta that a chunk adds to choice number `choice`."""
    reason: ChoiceFinishReason | None = None
    if chunk.finished:
        reason = "stop" if chunk.finished.reason == "stop" else "length"
    return OutputDelta(choice, chunk.pieces, chunk.tokens, chunk.logprobs, reason, chunk.audits, chunk.prompt_logprobs)


def split_by_token(delta: OutputDelta) -> Iterator[OutputDelta]:
    """Yield one delta per token of `delta`. The first one has the audits, and the last one has the finish reason."""
    # A delta without tokens or text still yields one delta, because it may carry the finish reason.
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
    """Return all deltas of one choice as a single delta."""
    return OutputDelta(
        deltas[0].choice,
        tuple(piece for delta in deltas for piece in delta.pieces),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        deltas[-1].finish_reason,
        tuple(audit for delta in deltas for audit in delta.audits),
        tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
    )


def answers_of(chunks: Sequence[Chunk], kept: int, first: int, *, logprobs: bool) -> list[OutputDelta]:
    """Return the answers to one prompt, as choices from number `first` on.

    If there are more than `kept`, those with the highest mean log-probability of their tokens are returned, best first.
    Without `logprobs`, the log-probabilities served only that choice and are left out.
    """
    deltas: defaultdict[int, list[OutputDelta]] = defaultdict(list)
    for chunk in chunks:
        deltas[chunk.index].append(delta_of(chunk, chunk.index))
    answers = [concatenate(deltas[index]) for index in sorted(deltas)]
    scores = answers[0].prompt_logprobs  # the engine scores a prompt once
    if len(answers) > kept:
        answers = sorted(answers, key=_mean_logprob, reverse=True)[:kept]
        answers = [answer if logprobs else replace(answer, logprobs=()) for answer in answers]
    return [
        replace(answer, choice=number, prompt_logprobs=scores) for number, answer in enumerate(answers, start=first)
    ]


def _mean_logprob(answer: OutputDelta) -> float:
    return fmean(entry.chosen for entry in answer.logprobs) if answer.logprobs else 0.0
