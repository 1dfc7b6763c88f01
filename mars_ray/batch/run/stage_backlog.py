"""Estimate the number of tokens that a job or stage still has to generate."""

from dataclasses import dataclass

FIRST_TOKENS = 64
"""Number of tokens per row to assume until the first row is done."""


def estimate_tokens_left(*, left: int, done: int, tokens: int) -> float:
    """Estimate the tokens of the `left` unfinished rows from the mean of the `done` rows, which have `tokens` in
    total."""
    return left * (tokens / done if done else FIRST_TOKENS)


@dataclass(slots=True, kw_only=True)
class StageBacklog:
    """Progress of one stage, in rows and tokens."""

    rows: int | None
    """Total number of rows that will arrive; None if unknown."""
    arrived: int = 0
    done: int = 0
    tokens: int = 0
    """Number of tokens in the finished rows."""

    @property
    def tokens_left(self) -> float:
        """Estimated number of tokens still to be generated."""
        left = max(self.rows or 0, self.arrived) - self.done
        return estimate_tokens_left(left=left, done=self.done, tokens=self.tokens)
