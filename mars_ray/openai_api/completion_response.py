"""Responses of `/v1/completions`: `text_completion`, whose complete responses and stream chunks have one shape."""

from collections.abc import Iterator, Sequence

from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice, Logprobs
from openai.types.completion_usage import CompletionUsage

from mars_ray.openai_api.deltas import ChoiceFinishReason, LogprobBuffer, LogprobEntry, OutputDelta
from mars_ray.openai_api.response_builder import ResponseMetadata, finite


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
