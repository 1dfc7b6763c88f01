"""Build responses of chat completions and of completions, complete or streamed.

In:    deltas of the choices, and what the response says about itself.
Out:   objects of the `openai` package, complete or as stream chunks.
Never: waits, or knows where deltas come from.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openai import BaseModel
from openai.types.chat.chat_completion import ChatCompletion, Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk, ChoiceDelta
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message import ChatCompletionMessage
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice, Logprobs
from openai.types.completion_usage import CompletionUsage

from mars_ray.openai_api.deltas import ChoiceFinishReason, LogprobBuffer, LogprobEntry, OutputDelta

LEAST_LOGPROB = -9999.0
"""Sent in place of minus infinity, which JSON cannot say: what OpenAI gives for a token that could not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMetadata:
    """Fields that all objects of one response share, and the bytes of tokens."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    token_bytes: Sequence[bytes]
    """The bytes of each token id."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; ids the tokenizer does not use have none."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def text_of(self, token: int) -> str:
        """Return the bytes of a token as text, with replacement characters where they are no UTF-8."""
        return self.bytes_of(token).decode(errors="replace")


class ResponseBuilder(Protocol):
    """Builds one response in the shape of chat completions or of completions."""

    def full(self, choices: Sequence[OutputDelta], usage: CompletionUsage) -> BaseModel:
        """Return the complete response, from one concatenated delta for each choice."""

    def chunks(self, delta: OutputDelta) -> Iterator[BaseModel]:
        """Yield the stream chunks that carry a delta."""

    def usage_chunk(self, usage: CompletionUsage) -> BaseModel:
        """Return the last chunk of a stream, which carries the usage and no choice."""


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can say it."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


class ChatResponseBuilder:
    """Builds `chat.completion` objects and their chunks; see `ResponseBuilder`."""

    def __init__(self, metadata: ResponseMetadata) -> None:
        self._metadata = metadata
        self._logprobs = LogprobBuffer()
        self._begun: set[int] = set()
        """Choices whose first chunk, with the role, was sent."""

    def full(self, choices: Sequence[OutputDelta], usage: CompletionUsage) -> ChatCompletion:
        """Return the complete response."""
        metadata = self._metadata
        return ChatCompletion(
            id=metadata.id,
            object="chat.completion",
            created=metadata.created,
            model=metadata.model,
            choices=[
                Choice(
                    index=each.choice,
                    message=ChatCompletionMessage(role="assistant", content=each.text, refusal=None),
                    logprobs=ChoiceLogprobs(
                        content=_logprobs(self._logprobs.take(each), metadata), **_audits(each, metadata)
                    )
                    if each.logprobs
                    else None,
                    finish_reason=each.finish_reason or "length",
                )
                for each in choices
            ],
            usage=usage,
        )

    def chunks(self, delta: OutputDelta) -> Iterator[ChatCompletionChunk]:
        """Yield the role, the text and the finish reason, each in a chunk of its own, as OpenAI does."""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            yield self._chunk(
                ChunkChoice(index=delta.choice, delta=ChoiceDelta(role="assistant", content=""), finish_reason=None)
            )
        entries = self._logprobs.take(delta)
        if delta.text or delta.audits:
            found, audits = _logprobs(entries, self._metadata), _audits(delta, self._metadata)
            logprobs = ChunkLogprobs(content=found, **audits) if found or audits else None
            content = ChoiceDelta(content=delta.text)
            yield self._chunk(ChunkChoice(index=delta.choice, delta=content, logprobs=logprobs, finish_reason=None))
        if delta.finish_reason:
            yield self._chunk(ChunkChoice(index=delta.choice, delta=ChoiceDelta(), finish_reason=delta.finish_reason))

    def usage_chunk(self, usage: CompletionUsage) -> ChatCompletionChunk:
        """Return the last chunk, which carries the usage and no choice."""
        return self._chunk().model_copy(update={"usage": usage})

    def _chunk(self, *choices: ChunkChoice) -> ChatCompletionChunk:
        metadata = self._metadata
        return ChatCompletionChunk(
            id=metadata.id,
            object="chat.completion.chunk",
            created=metadata.created,
            model=metadata.model,
            choices=list(choices),
        )


def _audits(delta: OutputDelta, metadata: ResponseMetadata) -> dict[str, Any]:
    """Return our field beside the log-probabilities: what one token at a time would have said at masks."""
    found = [
        {
            "index": each.index,
            "token": metadata.text_of(each.token),
            "bytes": list(metadata.bytes_of(each.token)),
            "logprob": math.log(each.confidence) if each.confidence else LEAST_LOGPROB,
        }
        for each in delta.audits
    ]
    return {"audits": found} if found else {}


def _logprobs(entries: Sequence[LogprobEntry], metadata: ResponseMetadata) -> list[ChatCompletionTokenLogprob]:
    return [
        ChatCompletionTokenLogprob(
            token=metadata.text_of(token),
            bytes=list(metadata.bytes_of(token)),
            logprob=finite(logprobs.chosen),
            top_logprobs=[
                TopLogprob(token=metadata.text_of(i), bytes=list(metadata.bytes_of(i)), logprob=finite(p))
                for i, p in logprobs.top
            ],
            index=number,
            forward=logprobs.forward,
        )
        for token, number, _, logprobs in entries
    ]


class CompletionResponseBuilder:
    """Builds `text_completion` objects; see `ResponseBuilder`."""

    def __init__(self, metadata: ResponseMetadata) -> None:
        self._metadata = metadata
        self._logprobs = LogprobBuffer()

    def full(self, choices: Sequence[OutputDelta], usage: CompletionUsage) -> Completion:
        """Return the complete response."""
        return self._completion([self._choice(each, each.finish_reason or "length") for each in choices], usage)

    def chunks(self, delta: OutputDelta) -> Iterator[Completion]:
        """Yield the chunk of a delta; one that says nothing has none."""
        choice = self._choice(delta, delta.finish_reason)
        if delta.text or delta.finish_reason:
            # OpenAI's type wants a reason in every chunk, its server sends null until the last.
            yield self._completion([choice])

    def usage_chunk(self, usage: CompletionUsage) -> Completion:
        """Return the last chunk, which carries the usage and no choice."""
        return self._completion([], usage)

    def _choice(self, delta: OutputDelta, reason: ChoiceFinishReason | None) -> CompletionChoice:
        entries = self._logprobs.take(delta)
        logprobs = self._entries(entries) if entries or delta.logprobs else None
        return CompletionChoice.construct(index=delta.choice, text=delta.text, logprobs=logprobs, finish_reason=reason)

    def _entries(self, entries: Sequence[LogprobEntry]) -> Logprobs:
        text_of = self._metadata.text_of
        return Logprobs(
            tokens=[text_of(each.token) for each in entries],
            token_logprobs=[finite(each.logprobs.chosen) for each in entries],
            top_logprobs=[{text_of(i): finite(p) for i, p in each.logprobs.top} for each in entries],
            text_offset=[each.start for each in entries],
        )

    def _completion(self, choices: list[CompletionChoice], usage: CompletionUsage | None = None) -> Completion:
        metadata = self._metadata
        completion = Completion(
            id=metadata.id,
            object="text_completion",
            created=metadata.created,
            model=metadata.model,
            choices=choices,
        )
        return completion if usage is None else completion.model_copy(update={"usage": usage})
