"""Who owns which row of the KV cache, and which finished sequences still lie in the others.

In:    sequences that need a row, grow, and give it back.
Out:   a row and a reusable prefix for each; the copies that keep the active rows at the front.
Never: touches a tensor, chooses who is admitted or preempted.

A row holds one sequence from its first token on. Active rows are 0..active-1, so attention reads a slice. The rows
behind them hold what finished sequences left, least recently used first to go; a new sequence takes over, or copies,
the one that shares the longest prefix with it. All rows have the same width. It doubles when a sequence outgrows it,
and then the same memory holds half as many rows.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Protocol

FIRST_WIDTH = 256
"""Tokens per row at the start: short conversations need no more, and a narrow cache is read from nearer memory."""


class Owner(Protocol):
    """What a row needs to know of its sequence."""

    tokens: list[int]
    cached: int
    """Leading tokens whose keys and values are in the row. Masks and unverified drafts never count."""
    row: int | None

    @property
    def tenant(self) -> str:
        """Whose content it is: what one tenant left is never reused, and so never timed, by another."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `length` positions of row `source` over row `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Exchange the first `length` positions of two rows."""

    one: int
    other: int
    length: int


@dataclass(frozen=True, slots=True)
class Resize:
    """Make a cache of `rows` rows of `width` positions, keeping what fits of the first rows."""

    rows: int
    width: int


CacheOp = Copy | Swap | Resize


@dataclass(slots=True)
class _Row:
    owner: Owner | None = None
    left: list[int] = field(default_factory=list)
    """What a finished sequence left; unused while the row has an owner."""
    tenant: str = ""
    used: int = 0

    def content(self) -> List[int]:
        return self.left if self.owner is None else self.owner.tokens

    def length(self) -> int:
        return len(self.left) if self.owner is None else self.owner.cached


class KVRows:
    """The rows of one cache of at most `tokens` positions and `rows_max` rows, for sequences up to `longest` tokens.

    `operations` is what the tensors have yet to do, in order.
    """

    def __init__(self, *, tokens: int, rows_max: int, longest: int) -> None:
        assert tokens >= longest, "one sequence of full length must fit"
        self._tokens, self._rows_max, self._longest = tokens, rows_max, longest
        self._clock = 0
        self.active = 0
        self.operations: list[CacheOp] = []
        self.clear()

    def clear(self) -> None:
        """Forget all content. No row may be active."""
        assert self.active == 0, "a row in use cannot be cleared"
        self.width = self._width_for(1)
        self._rows = [_Row() for _ in range(self.rows_at(self.width))]
        self.operations[:] = [Resize(len(self._rows), self.width)]

    @property
    def rows(self) -> int:
        """Rows there are at the present width."""
        return len(self._rows)

    @property
    def used_tokens(self) -> int:
        """Positions that active sequences fill."""
        return sum(row.length() for row in self._rows[: self.active])

    def rows_at(self, length: int) -> int:
        """Return how many rows there are once rows are wide enough for `length` tokens."""
        return max(1, min(self._rows_max, self._tokens // self._width_for(length)))

    def owner(self, row: int) -> Owner | None:
        """Return the sequence in `row`."""
        return self._rows[row].owner

    def shared(self, owner: Owner) -> tuple[int, int]:
        """Return the longest prefix of its tokens that some row holds, and the longest that one will soon hold.

        At least the last token is left over: it must be fed to get logits.
        """
        held = soon = 0
        for row in self._rows:
            common = _shared_length(row, owner)
            held, soon = max(held, min(common, row.length())), max(soon, common)
        return held, soon

    def acquire(self, owner: Owner) -> None:
        """Give `owner` the next active row, with the longest prefix of its tokens that any row holds."""
        assert self.active < len(self._rows), "no row is free"
        self._clock += 1
        lengths = [min(_shared_length(row, owner), row.length()) for row in self._rows]
        source = max(range(len(lengths)), key=lambda number: (lengths[number], number >= self.active))
        length, target = lengths[source], self.active
        if length and source >= self.active:
            self._swap(source, target)
        else:
            self._make_room(target)
            if length:
                self._rows[source].used = self._clock
                self.operations.append(Copy(source, target, length))
        self._rows[target] = _Row(owner=owner, tenant=owner.tenant, used=self._clock)
        self.active += 1
        owner.row, owner.cached = target, length

    def release(self, owner: Owner) -> None:
        """Take the row of `owner` back and keep what is in it for sequences with the same prefix."""
        assert owner.row is not None and self._rows[owner.row].owner is owner, "only the owner releases a row"
        self._clock += 1
        row, owner.row = owner.row, None
        self._rows[row] = _Row(left=owner.tokens[: owner.cached], tenant=owner.tenant, used=self._clock)
        self.active -= 1
        self._swap(row, self.active)

    def widen(self, length: int) -> None:
        """Make every row wide enough for `length` tokens. There must be no more active rows than then remain."""
        if length > self.width:
            self._resize(self._width_for(length))

    def narrow(self, length: int) -> bool:
        """Make room for more rows if rows need not be wider than for `length` tokens; say whether that was so."""
        if self.rows_at(length) <= len(self._rows):
            return False
        self._resize(self._width_for(length))
        return True

    def _width_for(self, length: int) -> int:
        width = FIRST_WIDTH
        while width < length:
            width *= 2
        return min(width, self._longest)

    def _resize(self, width: int) -> None:
        rows = self.rows_at(width)
        assert self.active <= rows, "the cache cannot drop a row in use"
        self._rows = (self._rows + [_Row() for _ in range(rows)])[:rows]
        for row in self._rows[self.active :]:
            del row.left[width:]
        self.width = width
        self.operations.append(Resize(rows, width))

    def _make_room(self, target: int) -> None:
        """Move what `target` holds to where the least recently used leftovers are, unless those are its own."""
        victim = min(range(self.active, len(self._rows)), key=lambda number: self._rows[number].used)
        if victim != target:
            self._rows[victim] = self._rows[target]
            self.operations.append(Copy(target, victim, self._rows[target].length()))

    def _swap(self, one: int, other: int) -> None:
        if one == other:
            return
        length = max(self._rows[one].length(), self._rows[other].length())
        self._rows[one], self._rows[other] = self._rows[other], self._rows[one]
        for number in (one, other):
            moved = self._rows[number].owner
            if moved is not None:
                moved.row = number
        if length:
            self.operations.append(Swap(one, other, length))


def _shared_length(row: _Row, owner: Owner) -> int:
    return _common(row.content(), owner.tokens, len(owner.tokens) - 1) if row.tenant == owner.tenant else 0


def _common(one: List[int], other: List[int], most: int) -> int:
    """Return the length of the common prefix, at most `most`."""
    most = min(most, len(one), len(other))
    if one[:most] == other[:most]:  # the usual shared system prompt, at the speed of a list comparison
        return most
    low = 0
    while low < most:  # halving: what is equal up to the middle never need be compared again
        middle = (low + most + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            most = middle - 1
    return low
