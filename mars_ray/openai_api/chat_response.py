"""Responses of `/v1/chat/completions`: `chat.completion` and `chat.completion.chunk`."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from openai.types.chat.chat_completion import ChatCompletion, Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk, ChoiceDelta
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message import ChatCompletionMessage
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_usage import CompletionUsage

from mars_ray.openai_api.deltas import LogprobBuffer, LogprobEntry, OutputDelta
from mars_ray.openai_api.response_builder import LEAST_LOGPROB, ResponseMetadata, finite


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
