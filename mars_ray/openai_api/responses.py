"""Build the responses to chat completion and completion requests, complete or streamed.

In:    the deltas of the choices, and the metadata of the response.
Out:   objects of the `openai` package, complete or as stream chunks.
Never: waits, or depends on the source of the deltas.
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

from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.chat_parts import ChoiceParts
from mars_ray.openai_api.deltas import ChoiceFinishReason, LogprobBuffer, LogprobEntry, OutputDelta
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

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an id that the tokenizer does not use."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def text_of(self, token: int) -> str:
        """Return the bytes of a token as text, with replacement characters for bytes that are not valid UTF-8."""
        return self.bytes_of(token).decode(errors="replace")


class ResponseBuilder(Protocol):
    """Builds one response in the shape of chat completions or of completions."""

    def full(self, choices: Sequence[OutputDelta], usage: CompletionUsage) -> BaseModel:
        """Return the complete response, built from one concatenated delta per choice."""

    def chunks(self, delta: OutputDelta) -> Iterator[BaseModel]:
        """Yield the stream chunks that carry a delta."""

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

    def full(self, choices: Sequence[OutputDelta], usage: CompletionUsage) -> ChatCompletion:
        """Return the complete response."""
        metadata = self._metadata
        return ChatCompletion(
            id=metadata.id,
            object="chat.completion",
            created=metadata.created,
            model=metadata.model,
            choices=[self._full_choice(delta) for delta in choices],
            usage=usage,
            **(self._prompt.field(choices[0], metadata.text_of) if self._prompt else {}),
        )

    def _full_choice(self, delta: OutputDelta) -> Choice:
        metadata = self._metadata
        choice = ChoiceParts(self._plan, metadata.id, delta.choice)
        reason = delta.finish_reason or "length"
        parts = choice.push(delta.text, reason)
        logprobs = None
        if delta.logprobs:
            content = _logprobs(self._logprobs.take(delta), metadata)
            logprobs = ChoiceLogprobs(content=content, **_audits(delta, metadata))
        return Choice(
            index=delta.choice,
            message=choice.message(parts),
            logprobs=logprobs,
            finish_reason=choice.finish_reason(reason),
        )

    def chunks(self, delta: OutputDelta) -> Iterator[ChatCompletionChunk]:
        """Yield the role, the parts of the answer and the finish reason, each in a chunk of its own, as OpenAI does.

        Log-probabilities are sent as soon as the text of their tokens is settled, with the first of its parts. If all
        of the text is held back, they are sent with empty content.
        """
        if delta.choice not in self._parts:
            self._parts[delta.choice] = ChoiceParts(self._plan, self._metadata.id, delta.choice)
            yield self._chunk(
                ChunkChoice(index=delta.choice, delta=ChoiceDelta(role="assistant", content=""), finish_reason=None)
            )
        choice = self._parts[delta.choice]
        content = _logprobs(self._logprobs.take(delta), self._metadata)
        audits = _audits(delta, self._metadata)
        logprobs = ChunkLogprobs(content=content, **audits) if content or audits else None
        deltas = [choice.delta(part) for part in choice.push(delta.text, delta.finish_reason)]
        for part in deltas or ([ChoiceDelta(content="")] if logprobs else []):
            yield self._chunk(ChunkChoice(index=delta.choice, delta=part, logprobs=logprobs, finish_reason=None))
            logprobs = None
        if delta.finish_reason:
            reason = choice.finish_reason(delta.finish_reason)
            yield self._chunk(ChunkChoice(index=delta.choice, delta=ChoiceDelta(), finish_reason=reason))

    def last_chunks(self, usage: CompletionUsage) -> Iterator[ChatCompletionChunk]:
        """Yield the last chunk, which carries the usage and no choice."""
        yield self._chunk().model_copy(update={"usage": usage})

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
    """Return our field `audits`, the autoregressive choices for tokens accepted at masks, unless there are none."""
    audits = [
        {
            "index": audit.index,
            "token": metadata.text_of(audit.token),
            "bytes": list(metadata.bytes_of(audit.token)),
            "logprob": math.log(audit.confidence) if audit.confidence else LEAST_LOGPROB,
        }
        for audit in delta.audits
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

    def full(self, choices: Sequence[OutputDelta], usage: CompletionUsage) -> Completion:
        """Return the complete response."""
        return self._completion([self._choice(delta, delta.finish_reason or "length") for delta in choices], usage)

    def chunks(self, delta: OutputDelta) -> Iterator[Completion]:
        """Yield the chunk of a delta, if the delta has text or a finish reason."""
        choice = self._choice(delta, delta.finish_reason)
        if choice.text or delta.finish_reason:
            # OpenAI's type requires a finish reason in every chunk, but its server sends null until the last one.
            yield self._completion([choice])

    def last_chunks(self, usage: CompletionUsage) -> Iterator[Completion]:
        """Yield the last chunk, which carries the usage and no choice."""
        yield self._completion([], usage)

    def _choice(self, delta: OutputDelta, reason: ChoiceFinishReason | None) -> CompletionChoice:
        entries = self._logprobs.take(delta)
        logprobs = self._entries(entries) if entries or delta.logprobs else None
        text, fields = delta.text, dict[str, Any]()
        if self._prompts:
            prompt = self._prompts[delta.choice // self._n]
            if delta.choice not in self._begun:
                text = prompt.echo + text
            logprobs = prompt.before(logprobs, delta, self._metadata.text_of)
            fields = prompt.field(delta, self._metadata.text_of)
            self._begun.add(delta.choice)
        return CompletionChoice.construct(
            index=delta.choice, text=text, logprobs=logprobs, finish_reason=reason, **fields
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
        metadata = self._metadata
        completion = Completion(
            id=metadata.id,
            object="text_completion",
            created=metadata.created,
            model=metadata.model,
            choices=choices,
        )
        return completion if usage is None else completion.model_copy(update={"usage": usage})
