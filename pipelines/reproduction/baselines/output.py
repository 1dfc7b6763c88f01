"""The output of a baseline decoder: tokens, finish reason and number of forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mars_ray.errors import ConfigError
from mars_ray.method.reference import FinishReason


@dataclass(slots=True)
class BaselineOutput:
    """An answer of up to `max_tokens` tokens. Raises `ConfigError` if `max_tokens` is less than 1."""

    max_tokens: int
    stop_ids: frozenset[int]
    """The answer ends with the first of these ids, which is included in `tokens`."""
    tokens: list[int] = field(default_factory=list)
    forwards: int = 0
    """Number of forwards of the answering network, including the forward that reads the prompt."""
    draft_forwards: int = 0
    """Number of forwards of the draft network, if there is one."""
    finish_reason: FinishReason = "length"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1.")

    @property
    def left(self) -> int:
        """Number of tokens that may still be added."""
        return self.max_tokens - len(self.tokens)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason == "stop" or self.left == 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens up to the first stop token or the limit of the answer."""
        for token in tokens:
            if self.is_finished:
                return
            self.tokens.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
