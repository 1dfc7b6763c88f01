"""Answers of `/v1/completions`: `text_completion`, which has one shape for whole answers and for pieces."""

from collections.abc import Iterator, Sequence

from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice, Logprobs
from openai.types.completion_usage import CompletionUsage

from mars_ray.serve.parts import Part, Reason
from mars_ray.serve.reply import Naming, finite


class CompletionReply:
    """`text_completion`, which has one shape for both."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._offsets: dict[int, int] = {}
        """Characters each choice has so far."""

    def whole(self, parts: Sequence[Part], usage: CompletionUsage) -> Completion:
        """See `Reply`."""
        return self._completion([self._choice(part, part.reason or "length") for part in parts], usage)

    def pieces(self, part: Part) -> Iterator[Completion]:
        """See `Reply`."""
        if part.text or part.logprobs or part.reason:
            # OpenAI's type wants a reason in every chunk, its server sends null until the last.
            yield self._completion([self._choice(part, part.reason)])

    def closing(self, usage: CompletionUsage) -> Completion:
        """See `Reply`."""
        return self._completion([], usage)

    def _choice(self, part: Part, reason: Reason | None) -> CompletionChoice:
        logprobs = self._logprobs(part) if part.logprobs else None
        return CompletionChoice.construct(index=part.choice, text=part.text, logprobs=logprobs, finish_reason=reason)

    def _logprobs(self, part: Part) -> Logprobs:
        spell, offset, offsets = self._naming.spell, self._offsets.get(part.choice, 0), []
        for piece in part.pieces:
            offsets.append(offset)
            offset += len(piece)
        self._offsets[part.choice] = offset
        return Logprobs(
            tokens=[spell(token) for token in part.tokens],
            token_logprobs=[finite(entry.chosen) for entry in part.logprobs],
            top_logprobs=[{spell(i): finite(p) for i, p in entry.top} for entry in part.logprobs],
            text_offset=offsets[: len(part.tokens)],
        )

    def _completion(self, choices: list[CompletionChoice], usage: CompletionUsage | None = None) -> Completion:
        naming = self._naming
        completion = Completion(
            id=naming.id, object="text_completion", created=naming.created, model=naming.model, choices=choices
        )
        return completion if usage is None else completion.model_copy(update={"usage": usage})
