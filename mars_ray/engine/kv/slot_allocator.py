"""Who owns which slot of the KV cache, and which finished sequences still lie in the others.

A slot, one row of the cache's tensors, holds one sequence from its first token on. Active slots are
0..num_active - 1, so attention reads a slice. The slots behind them hold what finished sequences left, least recently
used first to go; a new sequence takes over, or copies, the one that shares the longest prefix with it. All slots have
the same width. It doubles when a sequence outgrows it, and then the same memory holds half as many slots.

Nothing here touches a tensor: `operations` says what the tensors have to do. Who is admitted or preempted is decided by
the scheduler.
"""

from collections import abc
from dataclasses import dataclass, field
from typing import Protocol

FIRST_WIDTH = 256
"""Tokens per slot at the start: short conversations need no more, and a narrow cache is read from nearer memory."""


class Owner(Protocol):
    """What the allocator needs to know of a sequence."""

    tokens: list[int]
    num_computed_tokens: int
    """Leading tokens whose keys and values are in the slot. Masks and unverified drafts never count."""
    slot: int | None

    @property
    def tenant(self) -> str:
        """Whose content it is: what one tenant left is never reused, and so never timed, by another."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `length` positions of slot `source` over slot `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Exchange the first `length` positions of two slots."""

    one: int
    other: int
    length: int


@dataclass(frozen=True, slots=True)
class Resize:
    """Make a cache of `slots` slots of `width` positions, keeping what fits of the first slots."""

    slots: int
    width: int


CacheOp = Copy | Swap | Resize


@dataclass(slots=True)
class _Slot:
    owner: Owner | None = None
    left: list[int] = field(default_factory=list)
    """What a finished sequence left; unused while the slot has an owner."""
    tenant: str = ""
    used: int = 0

    def content(self) -> abc.Sequence[int]:
        return self.left if self.owner is None else self.owner.tokens

    def length(self) -> int:
        return len(self.left) if self.owner is None else self.owner.num_computed_tokens


class SlotAllocator:
    """The slots of one cache.

    The cache holds at most `max_tokens` tokens in at most `max_slots` slots, and a sequence at most `max_model_len`
    tokens. `operations` is what the tensors have yet to do, in order.
    """

    def __init__(self, *, max_tokens: int, max_slots: int, max_model_len: int) -> None:
        assert max_tokens >= max_model_len, "one sequence of full length must fit"
        self._max_tokens, self._max_slots, self._max_model_len = max_tokens, max_slots, max_model_len
        self._clock = 0
        self.num_active = 0
        self.operations: list[CacheOp] = []
        self.clear()

    def clear(self) -> None:
        """Forget all content. No slot may be active."""
        assert self.num_active == 0, "a slot in use cannot be cleared"
        self.width = self._width_for(1)
        self._slots = [_Slot() for _ in range(self.slots_at(self.width))]
        self.operations[:] = [Resize(len(self._slots), self.width)]

    @property
    def num_slots(self) -> int:
        """Slots there are at the present width."""
        return len(self._slots)

    @property
    def used_tokens(self) -> int:
        """Positions that active sequences fill."""
        return sum(slot.length() for slot in self._slots[: self.num_active])

    def slots_at(self, length: int) -> int:
        """Return how many slots there are once slots are wide enough for `length` tokens."""
        return max(1, min(self._max_slots, self._max_tokens // self._width_for(length)))

    def owner(self, slot: int) -> Owner | None:
        """Return the sequence in `slot`."""
        return self._slots[slot].owner

    def shared_prefix(self, owner: Owner) -> tuple[int, int]:
        """Return how long a prefix of the owner's tokens some slot holds, and how long a one some slot will soon hold.

        At least the last token is left over: it must be fed to get logits.
        """
        held = soon = 0
        for slot in self._slots:
            common = _shared_length(slot, owner)
            held, soon = max(held, min(common, slot.length())), max(soon, common)
        return held, soon

    def allocate(self, owner: Owner) -> None:
        """Give `owner` the next free slot, with the longest prefix of its tokens that any slot holds."""
        assert self.num_active < len(self._slots), "no slot is free"
        self._clock += 1
        lengths = [min(_shared_length(slot, owner), slot.length()) for slot in self._slots]
        source = max(range(len(lengths)), key=lambda number: (lengths[number], number >= self.num_active))
        length, target = lengths[source], self.num_active
        if length and source >= self.num_active:
            self._swap(source, target)
        else:
            self._make_room(target)
            if length:
                self._slots[source].used = self._clock
                self.operations.append(Copy(source, target, length))
        self._slots[target] = _Slot(owner=owner, tenant=owner.tenant, used=self._clock)
        self.num_active += 1
        owner.slot, owner.num_computed_tokens = target, length

    def free(self, owner: Owner) -> None:
        """Take the slot of `owner` back and keep what is in it for sequences with the same prefix."""
        assert owner.slot is not None and self._slots[owner.slot].owner is owner, "only the owner frees a slot"
        self._clock += 1
        slot, owner.slot = owner.slot, None
        self._slots[slot] = _Slot(left=owner.tokens[: owner.num_computed_tokens], tenant=owner.tenant, used=self._clock)
        self.num_active -= 1
        self._swap(slot, self.num_active)

    def widen(self, length: int) -> None:
        """Make every slot wide enough for `length` tokens. The active slots must be no more than then remain."""
        if length > self.width:
            self._resize(self._width_for(length))

    def narrow(self, length: int) -> bool:
        """Make room for more slots if slots need not be wider than for `length` tokens; return whether that was so."""
        if self.slots_at(length) <= len(self._slots):
            return False
        self._resize(self._width_for(length))
        return True

    def _width_for(self, length: int) -> int:
        width = FIRST_WIDTH
        while width < length:
            width *= 2
        return min(width, self._max_model_len)

    def _resize(self, width: int) -> None:
        slots = self.slots_at(width)
        assert self.num_active <= slots, "the cache cannot drop a slot in use"
        self._slots = (self._slots + [_Slot() for _ in range(slots)])[:slots]
        for slot in self._slots[self.num_active :]:
            del slot.left[width:]
        self.width = width
        self.operations.append(Resize(slots, width))

    def _make_room(self, target: int) -> None:
        """Move what `target` holds to where the least recently used leftovers are, unless those are its own."""
        victim = min(range(self.num_active, len(self._slots)), key=lambda number: self._slots[number].used)
        if victim != target:
            self._slots[victim] = self._slots[target]
            self.operations.append(Copy(target, victim, self._slots[target].length()))

    def _swap(self, one: int, other: int) -> None:
        if one == other:
            return
        length = max(self._slots[one].length(), self._slots[other].length())
        self._slots[one], self._slots[other] = self._slots[other], self._slots[one]
        for number in (one, other):
            moved = self._slots[number].owner
            if moved is not None:
                moved.slot = number
        if length:
            self.operations.append(Swap(one, other, length))


def _shared_length(slot: _Slot, owner: Owner) -> int:
    return _common(slot.content(), owner.tokens, len(owner.tokens) - 1) if slot.tenant == owner.tenant else 0


def _common(one: abc.Sequence[int], other: abc.Sequence[int], most: int) -> int:
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
