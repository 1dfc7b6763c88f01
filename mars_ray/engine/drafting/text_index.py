"""Find where the last tokens of a sequence occurred before, and what followed.

The index is the hash chain of LZ77 compressors (RFC 1951, section 4): a table maps each n-gram to its last position,
and each position points to the position before it with the same n-gram. A search walks one chain from the latest
position, compares backwards, and stops at a bound, so the time of a search does not depend on the length of the text.
A suffix automaton finds the same matches, except those beyond the bound, but needs several times the memory.

In:    Texts grow at their end, token by token.
Out:   A match is a place where the last tokens occurred before.
Never: Adding a token and searching never take time that grows with the text.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NGRAM = 3
"""Length of the n-grams in the table, and minimum length of a match. A border counts as a token, which never ends a
search, because no sequence has it."""

LONGEST = 32
"""Length beyond which matches are not compared. A longer match is hardly more reliable."""

CHAIN = 16
"""Number of positions of an n-gram that a search visits, counted from the latest."""

BYTES_PER_TOKEN = 256
"""Maximum memory of an index in bytes per token, for a text in which no n-gram occurs twice."""


class TextMatch(NamedTuple):
    """The place of the longest match, with what the other places of its n-gram say."""

    next: int
    """Position in the text of the token after the match."""
    length: int
    """Number of tokens that match, up to `LONGEST`."""
    agreeing: int
    """Number of compared places, this one included, at which the same token follows."""
    compared: int
    """Number of compared places."""


class TextIndex:
    """A growing text of tokens, indexed by n-grams."""

    __slots__ = ("_before", "_last", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self._last: dict[tuple[int, ...], int] = {}
        """End of the last occurrence of each n-gram, exclusive."""
        self._before = array("i")
        """End of the occurrence before the one that ends after this token; 0 if there is none."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end of the text."""
        text, last, before = self.tokens, self._last, self._before
        *_, second, first = (-1, -1, *text[-2:])
        end = len(text)
        for token in tokens:
            end += 1
            text.append(token)
            ngram = second, first, token
            before.append(last.get(ngram, 0))
            last[ngram] = end
            second, first = first, token

    def end_text(self) -> None:
        """Add a border that no n-gram of later tokens spans."""
        self.tokens.append(-1)
        self._before.append(0)

    def find(self, tokens: Sequence[int]) -> TextMatch | None:
        """Return the longest match for the end of `tokens`, among equals the latest; None if no n-gram matches.

        A place after which nothing follows in the text is no match. `tokens` may be the indexed text itself.
        """
        text, before = self.tokens, self._before
        end = self._last.get(tuple(tokens[-NGRAM:]), 0)
        if end == len(text):
            end = before[end - 1] if end else 0
        best = length = 0
        followers: list[int] = []
        limit = min(LONGEST, len(tokens))
        for _ in range(CHAIN):
            if not end:
                break
            if (follower := text[end]) >= 0:
                followers.append(follower)
                if length < limit:
                    same = NGRAM
                    while same < limit and same < end and text[end - 1 - same] == tokens[-1 - same]:
                        same += 1
                    if same > length:
                        best, length = end, same
            end = before[end - 1]
        if not best:
            return None
        return TextMatch(best, length, followers.count(text[best]), len(followers))

    def following(self, position: int, most: int) -> list[int]:
        """Return up to `most` tokens from a position on, up to the next border."""
        tokens = self.tokens[position : position + most].tolist()
        return tokens[: tokens.index(-1)] if -1 in tokens else tokens
