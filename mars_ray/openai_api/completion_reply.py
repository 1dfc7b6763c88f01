"""Answers of `/v1/completions`: `text_completion`, which has one shape for whole answers and for pieces."""

from collections.abc import Iterator, Sequence

from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice, Logprobs
from openai.types.completion_usage import CompletionUsage

from mars_ray.openai_api.parts import Entries, Entry, Part, Reason
from mars_ray.openai_api.reply import Naming, finite


class CompletionReply:
    """`text_completion`, which has one shape for both."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._entries = Entries()

    def whole(self, parts: Sequence[Part], usage: CompletionUsage) -> Completion:
        """See `Reply`."""
        return self._completion([self._choice(part, part.reason or "length") for part in parts], usage)

    def pieces(self, part: Part) -> Iterator[Completion]:
        """See `Reply`."""
        choice = self._choice(part, part.reason)
        if part.text or part.reason:
            # OpenAI's type wants a reason in every chunk, its server sends null until the last.
            yield self._completion([choice])

    def closing(self, usage: CompletionUsage) -> Completion:
        """See `Reply`."""
        return self._completion([], usage)

    def _choice(self, part: Part, reason: Reason | None) -> CompletionChoice:
        entries = self._entries.of(part)
        logprobs = self._logprobs(entries) if entries or part.logprobs else None
        return CompletionChoice.construct(index=part.choice, text=part.text, logprobs=logprobs, finish_reason=reason)

    def _logprobs(self, entries: Sequence[Entry]) -> Logprobs:
        spell = self._naming.spell
        return Logprobs(
            tokens=[spell(token) for token, _, _ in entries],
            token_logprobs=[finite(logprobs.chosen) for _, _, logprobs in entries],
            top_logprobs=[{spell(i): finite(p) for i, p in logprobs.top} for _, _, logprobs in entries],
            text_offset=[start for _, start, _ in entries],
        )

    def _completion(self, choices: list[CompletionChoice], usage: CompletionUsage | None = None) -> Completion:
        naming = self._naming
        completion = Completion(
            id=naming.id, object="text_completion", created=naming.created, model=naming.model, choices=choices
        )
        return completion if usage is None else completion.model_copy(update={"usage": usage})
