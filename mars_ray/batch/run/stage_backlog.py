"""Estimate the tokens that a job or a stage has still to generate."""

from dataclasses import dataclass

FIRST_TOKENS = 64
"""Tokens per row, assumed until the first row is done."""


def estimate_tokens_left(*, left: int, done: int, tokens: int) -> float:
    """Return the tokens of the `left` rows, at the mean of the `done` rows, which took `tokens`."""
    return left * (tokens / done if done else FIRST_TOKENS)


@dataclass(slots=True, kw_only=True)
class StageBacklog:
    """Counts of the rows of one stage."""

    rows: int | None
    """Rows that will come in total, if known."""
    arrived: int = 0
    done: int = 0
    tokens: int = 0
    """Tokens of the finished rows."""

    @property
    def tokens_left(self) -> float:
        """Estimate of the tokens still to be generated."""
        left = max(self.rows or 0, self.arrived) - self.done
        return estimate_tokens_left(left=left, done=self.done, tokens=self.tokens)
