"""Answers of `/v1/chat/completions`: `chat.completion` and `chat.completion.chunk`."""

from collections.abc import Iterator, Sequence

from openai.types.chat.chat_completion import ChatCompletion, Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk, ChoiceDelta
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message import ChatCompletionMessage
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_usage import CompletionUsage

from mars_ray.openai_api.parts import Entries, Entry, Part
from mars_ray.openai_api.reply import Naming, finite


class ChatReply:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._entries = Entries()
        self._begun: set[int] = set()
        """Choices whose turn was announced."""

    def whole(self, parts: Sequence[Part], usage: CompletionUsage) -> ChatCompletion:
        """See `Reply`."""
        naming = self._naming
        return ChatCompletion(
            id=naming.id,
            object="chat.completion",
            created=naming.created,
            model=naming.model,
            choices=[
                Choice(
                    index=part.choice,
                    message=ChatCompletionMessage(role="assistant", content=part.text, refusal=None),
                    logprobs=ChoiceLogprobs(content=_logprobs(self._entries.of(part), naming))
                    if part.logprobs
                    else None,
                    finish_reason=part.reason or "length",
                )
                for part in parts
            ],
            usage=usage,
        )

    def pieces(self, part: Part) -> Iterator[ChatCompletionChunk]:
        """Yield whose turn it is, the text, and the reason, each in a chunk of its own, as OpenAI does."""
        if part.choice not in self._begun:
            self._begun.add(part.choice)
            yield self._chunk(
                ChunkChoice(index=part.choice, delta=ChoiceDelta(role="assistant", content=""), finish_reason=None)
            )
        entries = self._entries.of(part)
        if part.text:
            logprobs = ChunkLogprobs(content=_logprobs(entries, self._naming)) if entries else None
            delta = ChoiceDelta(content=part.text)
            yield self._chunk(ChunkChoice(index=part.choice, delta=delta, logprobs=logprobs, finish_reason=None))
        if part.reason:
            yield self._chunk(ChunkChoice(index=part.choice, delta=ChoiceDelta(), finish_reason=part.reason))

    def closing(self, usage: CompletionUsage) -> ChatCompletionChunk:
        """See `Reply`."""
        return self._chunk().model_copy(update={"usage": usage})

    def _chunk(self, *choices: ChunkChoice) -> ChatCompletionChunk:
        naming = self._naming
        return ChatCompletionChunk(
            id=naming.id,
            object="chat.completion.chunk",
            created=naming.created,
            model=naming.model,
            choices=list(choices),
        )


def _logprobs(entries: Sequence[Entry], naming: Naming) -> list[ChatCompletionTokenLogprob]:
    return [
        ChatCompletionTokenLogprob(
            token=naming.spell(token),
            bytes=list(naming.bytes_of(token)),
            logprob=finite(logprobs.chosen),
            top_logprobs=[
                TopLogprob(token=naming.spell(i), bytes=list(naming.bytes_of(i)), logprob=finite(p))
                for i, p in logprobs.top
            ],
        )
        for token, _, logprobs in entries
    ]
