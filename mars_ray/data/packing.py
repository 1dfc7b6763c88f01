"""Encoded examples -> rows of one length, several examples to a row.

In:    examples in order.
Out:   rows in a fixed order: best fit among a bounded number of open rows, so the same examples give the same rows.
Never: splits an example; one that is too long is cut at its end or dropped, and counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from mars_ray.data.chat import Encoded

OPEN_ROWS_MAX = 64
"""Rows that wait for a filling example. 64 leave under 2 % padding for examples of a tenth of a row."""


@dataclass(slots=True)
class Row:
    """One packed row; shorter than the length until padded."""

    tokens: list[int] = field(default_factory=list)
    response: list[bool] = field(default_factory=list)
    example: list[int] = field(default_factory=list)
    """Number of the example within the row, per token."""

    def append(self, encoded: Encoded) -> None:
        """Lay one more example behind the others."""
        number = self.example[-1] + 1 if self.example else 0
        self.tokens += encoded.tokens
        self.response += encoded.response
        self.example += [number] * len(encoded.tokens)


class Packer:
    """Packs examples as they come; `rows` are what `add` and `finish` return, in order."""

    def __init__(self, length: int, overlong: Literal["drop", "truncate"]) -> None:
        self._length = length
        self._overlong = overlong
        self._open: list[Row] = []
        self.examples = 0
        self.tokens = 0
        self.response_tokens = 0
        self.dropped = 0
        self.truncated = 0

    def add(self, encoded: Encoded) -> Iterator[Row]:
        """Place one example; yields a row when one had to be closed for it."""
        if len(encoded.tokens) > self._length:
            encoded = Encoded(encoded.tokens[: self._length], encoded.response[: self._length])
            if self._overlong == "drop" or not any(encoded.response):
                self.dropped += 1
                return
            self.truncated += 1
        self.examples += 1
        self.tokens += len(encoded.tokens)
        self.response_tokens += sum(encoded.response)
        fitting = [row for row in self._open if len(row.tokens) + len(encoded.tokens) <= self._length]
        if fitting:
            row = max(fitting, key=lambda row: len(row.tokens))
        else:
            if len(self._open) == OPEN_ROWS_MAX:
                yield self._close(max(self._open, key=lambda row: len(row.tokens)))
            row = Row()
            self._open.append(row)
        row.append(encoded)
        if len(row.tokens) == self._length:
            yield self._close(row)

    def finish(self) -> Iterator[Row]:
        """Yield the rows that are still open."""
        while self._open:
            yield self._close(self._open[0])

    def _close(self, row: Row) -> Row:
        # By identity: two rows with equal tokens are still two rows.
        self._open = [other for other in self._open if other is not row]
        return row
