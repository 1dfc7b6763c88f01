"""Build the responses to chat completion and completion requests, complete or streamed.

In:    chunks of the engine whose index is the number of their choice, and the metadata of the response.
Out:   objects of the `openai` package, complete or as stream chunks.
Never: waits, or depends on the source of the chunks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openai.types.chat.chat_completion import ChatCompletion, Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import ChatCompletionChunk, ChoiceDelta
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice, Logprobs
from openai.types.completion_usage import CompletionUsage
from pydantic import BaseModel

from mars_ray.engine.chunk import Chunk
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.chat_parts import ChoiceParts
from mars_ray.openai_api.choices import ChoiceFinishReason, LogprobBuffer, LogprobEntry, finish_reason_of
from mars_ray.openai_api.prompt_scores import LEAST_LOGPROB, ScoredPrompt, finite, likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMetadata:
    """Fields shared by all objects of one response, and the bytes of tokens."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    token_bytes: Sequence[bytes]
    """The bytes of each token id."""
    calls_id: str | None = None
    """What the ids of tool calls are made from; None for `id`. Callers who choose the ids of their requests may give
    two requests the same id, and the calls of two turns need different ids."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by their names in the API."""
        return {"id": self.id, "created": self.created, "model": self.model}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an id that the tokenizer does not use."""
        return self.token_bytes[token] if 0 <= token < len(self.token_bytes) else b""

    def text_of(self, token: int) -> str:
        """Return the bytes of a token as text, with replacement characters for bytes that are not valid UTF-8."""
        return self.bytes_of(token).decode(errors="replace")


class ResponseBuilder(Protocol):
    """Builds one response in the shape of chat completions or of completions."""

    def full(self, answers: Sequence[Chunk], usage: CompletionUsage) -> BaseModel:
        """Return the complete response, built from one joined chunk per choice."""

    def chunks(self, part: Chunk) -> Iterator[BaseModel]:
        """Yield the stream chunks that carry a part of a choice."""

    def last_chunks(self, usage: CompletionUsage) -> Iterator[BaseModel]:
        """Yield the end of a stream that carries the usage."""


class ChatResponseBuilder:
    """Builds `chat.completion` objects and their chunks; see `ResponseBuilder`."""

    def __init__(
        self, metadata: ResponseMetadata, plan: AnswerPlan | None = None, prompt: ScoredPrompt | None = None
    ) -> None:
        self._metadata = metadata
        self._plan = plan or AnswerPlan()
        self._prompt = prompt
        self._logprobs = LogprobBuffer()
        self._parts: dict[int, ChoiceParts] = {}
        """The choices whose first chunk, which carries the role, has been sent."""

    def full(self, answers: Sequence[Chunk], usage: CompletionUsage) -> ChatCompletion:
        """Return the complete response."""
        metadata = self._metadata
        return ChatCompletion(
            **metadata.fields,
            object="chat.completion",
            choices=[self._full_choice(answer) for answer in answers],
            usage=usage,
            **(self._prompt.field(answers[0], metadata.text_of) if self._prompt else {}),
        )

    def _full_choice(self, answer: Chunk) -> Choice:
        metadata = self._metadata
        choice = ChoiceParts(self._plan, metadata.calls_id or metadata.id, answer.index)
        reason = finish_reason_of(answer) or "length"
        parts = choice.push(answer.text, reason)
        logprobs = None
        if answer.logprobs:
            content = _logprobs(self._logprobs.take(answer), metadata)
            logprobs = ChoiceLogprobs(content=content, **_audits(answer, metadata))
        return Choice(
            index=answer.index,
            message=choice.message(parts),
            logprobs=logprobs,
            finish_reason=choice.finish_reason(reason),
        )

    def chunks(self, part: Chunk) -> Iterator[ChatCompletionChunk]:
        """Yield the role, the parts of the answer and the finish reason, each in a chunk of its own, as OpenAI does.

        Log-probabilities are sent as soon as the text of their tokens is settled, with the first of its parts. If all
        of the text is held back, they are sent with empty content.
        """
        index, reason = part.index, finish_reason_of(part)
        if index not in self._parts:
            self._parts[index] = ChoiceParts(self._plan, self._metadata.calls_id or self._metadata.id, index)
            yield self._chunk(
                ChunkChoice(index=index, delta=ChoiceDelta(role="assistant", content=""), finish_reason=None)
            )
        choice = self._parts[index]
        content = _logprobs(self._logprobs.take(part), self._metadata)
        audits = _audits(part, self._metadata)
        logprobs = ChunkLogprobs(content=content, **audits) if content or audits else None
        deltas = [choice.delta(piece) for piece in choice.push(part.text, reason)]
        for delta in deltas or ([ChoiceDelta(content="")] if logprobs else []):
            yield self._chunk(ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None))
            logprobs = None
        if reason:
            reason = choice.finish_reason(reason)
            yield self._chunk(ChunkChoice(index=index, delta=ChoiceDelta(), finish_reason=reason))

    def last_chunks(self, usage: CompletionUsage) -> Iterator[ChatCompletionChunk]:
        """Yield the last chunk, which carries the usage and no choice."""
        yield self._chunk().model_copy(update={"usage": usage})

    def _chunk(self, *choices: ChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._metadata.fields, object="chat.completion.chunk", choices=list(choices))


def _audits(part: Chunk, metadata: ResponseMetadata) -> dict[str, Any]:
    """Return our field `audits`, the autoregressive choices for tokens accepted at masks, unless there are none."""
    audits = [
        {
            "index": audit.index,
            "token": metadata.text_of(audit.token),
            "bytes": list(metadata.bytes_of(audit.token)),
            "logprob": math.log(audit.confidence) if audit.confidence else LEAST_LOGPROB,
        }
        for audit in part.audits
    ]
    return {"audits": audits} if audits else {}


def _logprobs(entries: Sequence[LogprobEntry], metadata: ResponseMetadata) -> list[ChatCompletionTokenLogprob]:
    return [
        ChatCompletionTokenLogprob(
            token=metadata.text_of(token),
            bytes=list(metadata.bytes_of(token)),
            logprob=finite(logprobs.chosen),
            top_logprobs=[
                TopLogprob(token=metadata.text_of(top), bytes=list(metadata.bytes_of(top)), logprob=finite(logprob))
                for top, logprob in logprobs.top
            ],
            index=number,
            forward=logprobs.forward,
        )
        for token, number, _, logprobs in entries
    ]


class CompletionResponseBuilder:
    """Builds `text_completion` objects; see `ResponseBuilder`. Choice c answers prompt c // n, and
    `prompts` is empty if the response shows no prompts."""

    def __init__(self, metadata: ResponseMetadata, prompts: Sequence[ScoredPrompt] = (), n: int = 1) -> None:
        self._metadata = metadata
        self._prompts = prompts
        self._n = n
        self._begun: set[int] = set()
        """Choices whose prompt has been echoed."""
        self._logprobs = LogprobBuffer()

    def full(self, answers: Sequence[Chunk], usage: CompletionUsage) -> Completion:
        """Return the complete response."""
        return self._completion(
            [self._choice(answer, finish_reason_of(answer) or "length") for answer in answers], usage
        )

    def chunks(self, part: Chunk) -> Iterator[Completion]:
        """Yield the object of a part, if the part has text or a finish reason."""
        choice = self._choice(part, finish_reason_of(part))
        if choice.text or choice.finish_reason:
            # OpenAI's type requires a finish reason in every chunk, but its server sends null until the last one.
            yield self._completion([choice])

    def last_chunks(self, usage: CompletionUsage) -> Iterator[Completion]:
        """Yield the last chunk, which carries the usage and no choice."""
        yield self._completion([], usage)

    def _choice(self, part: Chunk, reason: ChoiceFinishReason | None) -> CompletionChoice:
        entries = self._logprobs.take(part)
        logprobs = self._entries(entries) if entries or part.logprobs else None
        text, fields = part.text, dict[str, Any]()
        if self._prompts:
            prompt = self._prompts[part.index // self._n]
            if part.index not in self._begun:
                text = prompt.echo + text
            logprobs = prompt.before(logprobs, part, self._metadata.text_of)
            fields = prompt.field(part, self._metadata.text_of)
            self._begun.add(part.index)
        return CompletionChoice.construct(
            index=part.index, text=text, logprobs=logprobs, finish_reason=reason, **fields
        )

    def _entries(self, entries: Sequence[LogprobEntry]) -> Logprobs:
        text_of = self._metadata.text_of
        return Logprobs(
            tokens=[text_of(entry.token) for entry in entries],
            token_logprobs=[finite(entry.logprobs.chosen) for entry in entries],
            top_logprobs=[likeliest(entry.token, entry.logprobs, text_of) for entry in entries],
            text_offset=[entry.start for entry in entries],
        )

    def _completion(self, choices: list[CompletionChoice], usage: CompletionUsage | None = None) -> Completion:
        completion = Completion(**self._metadata.fields, object="text_completion", choices=choices)
        return completion if usage is None else completion.model_copy(update={"usage": usage})
