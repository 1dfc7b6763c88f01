"""What is left for a job or a stage: tokens, as far as rows that are done tell."""

from dataclasses import dataclass

FIRST_TOKENS = 64
"""Tokens of an answer, as long as no row is done."""


def estimate_tokens_left(*, left: int, done: int, tokens: int) -> float:
    """Return the tokens that so many rows will take, if they are like the `done` ones, which took `tokens`."""
    return left * (tokens / done if done else FIRST_TOKENS)


@dataclass(slots=True, kw_only=True)
class StageBacklog:
    """The rows of one stage; it counts them."""

    rows: int | None
    """Rows that are to come in all, where that is known."""
    arrived: int = 0
    done: int = 0
    tokens: int = 0
    """Tokens of the rows that are done."""

    @property
    def tokens_left(self) -> float:
        """The tokens still to be generated."""
        left = max(self.rows or 0, self.arrived) - self.done
        return estimate_tokens_left(left=left, done=self.done, tokens=self.tokens)
