"""Assign the slots of the KV cache to sequences, and reuse the content that finished sequences left.

A slot is one row of the cache's tensors and holds one sequence from its first token on. Slots without a sequence keep
the content of finished ones and are evicted in least-recently-used order. A new sequence takes over, or copies, the
slot that shares the longest prefix with it. All slots have the same width, which doubles when a sequence outgrows it;
the same memory then holds half as many slots.

This module does not touch tensors: `operations` lists the changes to make. The scheduler decides which sequences are
admitted or preempted.
"""

from collections import abc
from dataclasses import dataclass, field
from typing import Protocol

FIRST_WIDTH = 256
"""Initial width of a slot in tokens. Short conversations need no more, and a narrow cache has better locality."""


class Owner(Protocol):
    """The fields of a sequence that the allocator uses."""

    tokens: list[int]
    num_computed_tokens: int
    """Number of leading tokens whose keys and values are in the slot. Masks and unverified drafts do not count."""
    slot: int | None

    @property
    def reuses_cache(self) -> bool:
        """Whether the owner may begin with content that the cache holds."""

    @property
    def tenant(self) -> str:
        """The only tenant that may reuse the content, so that timing reveals nothing to other tenants."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `length` positions of slot `source` over slot `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Resize:
    """Resize the cache to `slots` slots of `width` positions, keeping the content of the first slots that fits."""

    slots: int
    width: int


CacheOp = Copy | Resize


@dataclass(slots=True)
class _Slot:
    owner: Owner | None = None
    left: list[int] = field(default_factory=list)
    """Tokens of the finished sequence that left its content in the slot; not used while the slot has an owner."""
    tenant: str = ""
    used: int = 0

    def content(self) -> abc.Sequence[int]:
        return self.left if self.owner is None else self.owner.tokens

    def length(self) -> int:
        return len(self.left) if self.owner is None else self.owner.num_computed_tokens


class SlotAllocator:
    """The slots of one cache.

    The cache holds at most `max_tokens` tokens in at most `max_slots` slots, and a sequence at most `max_model_len`
    tokens. `operations` lists the pending changes of the tensors, in order.
    """

    def __init__(self, *, max_tokens: int, max_slots: int, max_model_len: int) -> None:
        assert max_tokens >= max_model_len, "one sequence of full length must fit"
        self._max_tokens = max_tokens
        self._max_slots = max_slots
        self._max_model_len = max_model_len
        self._clock = 0
        self._slots: list[_Slot] = []
        self.operations: list[CacheOp] = []
        self.clear()

    def clear(self) -> None:
        """Drop all content. No slot may be active."""
        assert len(self._free) == len(self._slots), "a slot in use cannot be cleared"
        self.width = self._width_for(1)
        self._slots = [_Slot() for _ in range(self.slots_at(self.width))]
        self.operations[:] = [Resize(len(self._slots), self.width)]

    @property
    def num_slots(self) -> int:
        """Number of slots at the current width."""
        return len(self._slots)

    @property
    def used_tokens(self) -> int:
        """Number of positions that active sequences fill."""
        return sum(slot.length() for slot in self._slots if slot.owner is not None)

    @property
    def _free(self) -> list[int]:
        """Slots without an owner, the least recently used first."""
        free = [number for number, slot in enumerate(self._slots) if slot.owner is None]
        return sorted(free, key=lambda number: self._slots[number].used)

    def slots_at(self, length: int) -> int:
        """Return the number of slots when each is wide enough for `length` tokens."""
        return max(1, min(self._max_slots, self._max_tokens // self._width_for(length)))

    def owner(self, slot: int) -> Owner | None:
        """Return the sequence in `slot`."""
        return self._slots[slot].owner

    def shared_prefix(self, owner: Owner, pausing: abc.Collection[Owner] = ()) -> tuple[int, int]:
        """Return the number of the owner's first tokens that a slot holds now, and the number that it will soon hold.

        Slots whose owners are in `pausing` do not grow soon. Both numbers exclude the last token, which must be run to
        get logits.
        """
        held = soon = 0
        for slot in self._slots:
            common = _shared_length(slot, owner)
            held = max(held, min(common, slot.length()))
            soon = max(soon, held if slot.owner in pausing else common)
        return held, soon

    def allocate(self, owner: Owner) -> None:
        """Assign a free slot to `owner`, filled with the longest prefix of its tokens that any slot holds."""
        free = self._free
        assert free, "no slot is free"
        self._clock += 1
        lengths = [min(_shared_length(slot, owner), slot.length()) for slot in self._slots]
        source = max(range(len(lengths)), key=lambda number: (lengths[number], self._slots[number].owner is None))
        length = lengths[source]
        target = source if length and source in free else free[0]
        if length and target != source:
            self._slots[source].used = self._clock
            self.operations.append(Copy(source, target, length))
        self._slots[target] = _Slot(owner=owner, tenant=owner.tenant, used=self._clock)
        owner.slot = target
        owner.num_computed_tokens = length

    def free(self, owner: Owner) -> None:
        """Free the slot of `owner`, and keep its content for sequences with the same prefix."""
        assert owner.slot is not None and self._slots[owner.slot].owner is owner, "only the owner frees a slot"
        self._clock += 1
        left = owner.tokens[: owner.num_computed_tokens]
        self._slots[owner.slot] = _Slot(left=left, tenant=owner.tenant, used=self._clock)
        owner.slot = None

    def widen(self, length: int) -> None:
        """Make every slot wide enough for `length` tokens. The active sequences must fit into the slots that remain."""
        if length > self.width:
            self._resize(self._width_for(length))

    def narrow(self, length: int) -> None:
        """Narrow the slots to `length` tokens if that gives more slots."""
        if self.slots_at(length) > len(self._slots):
            self._resize(self._width_for(length))

    def _width_for(self, length: int) -> int:
        width = FIRST_WIDTH
        while width < length:
            width *= 2
        return min(width, self._max_model_len)

    def _resize(self, width: int) -> None:
        slots = self.slots_at(width)
        free = [number for number in self._free if number < slots]
        for slot in self._slots[slots:]:
            if (owner := slot.owner) is not None:
                assert free and owner.slot is not None, "the cache cannot drop a slot in use"
                target = free.pop(0)
                self.operations.append(Copy(owner.slot, target, slot.length()))
                self._slots[target] = slot
                owner.slot = target
        self._slots = (self._slots + [_Slot() for _ in range(slots)])[:slots]
        for slot in self._slots:
            del slot.left[width:]
        self.width = width
        self.operations.append(Resize(slots, width))


def _shared_length(slot: _Slot, owner: Owner) -> int:
    if slot.tenant != owner.tenant or not owner.reuses_cache:
        return 0
    return _common(slot.content(), owner.tokens, len(owner.tokens) - 1)


def _common(left: abc.Sequence[int], right: abc.Sequence[int], limit: int) -> int:
    """Return the length of the common prefix, at most `limit`."""
    high = min(limit, len(left), len(right))
    if left[:high] == right[:high]:  # a list comparison is the fastest way to detect a shared system prompt
        return high
    low = 0
    while low < high:  # bisection compares only the part that is still undecided
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
