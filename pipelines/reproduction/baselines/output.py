"""Output of a baseline decoder: tokens, finish reason and forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mars_ray.errors import ConfigError
from mars_ray.method.reference import FinishReason


@dataclass(slots=True)
class BaselineOutput:
    """One sequence, without its prompt. Raises `ConfigError` when there is no room for a token."""

    max_tokens: int
    stop_ids: frozenset[int]
    """The answer ends with the first of these; it is the last of `tokens`."""
    tokens: list[int] = field(default_factory=list)
    forwards: int = 0
    """Forwards of the network whose answer this is, the one that reads the prompt included."""
    draft_forwards: int = 0
    """Forwards of the draft network, if there is one."""
    finish_reason: FinishReason = "length"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1.")

    @property
    def left(self) -> int:
        """Tokens the answer may still take."""
        return self.max_tokens - len(self.tokens)

    @property
    def is_finished(self) -> bool:
        """True once the answer takes no more tokens."""
        return self.finish_reason == "stop" or self.left == 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens up to the first stop token or the limit."""
        for token in tokens:
            if self.is_finished:
                return
            self.tokens.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
