"""Responses of `/v1/chat/completions`: `chat.completion` and `chat.completion.chunk`."""

from collections.abc import Iterator, Sequence

from openai.types.chat.chat_completion import ChatCompletion, Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk, ChoiceDelta
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message import ChatCompletionMessage
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_usage import CompletionUsage

from mars_ray.openai_api.deltas import LogprobBuffer, LogprobEntry, OutputDelta
from mars_ray.openai_api.response_builder import ResponseMetadata, finite


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
                    logprobs=ChoiceLogprobs(content=_logprobs(self._logprobs.take(each), metadata))
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
        if delta.text:
            logprobs = ChunkLogprobs(content=_logprobs(entries, self._metadata)) if entries else None
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
        )
        for token, _, logprobs in entries
    ]
