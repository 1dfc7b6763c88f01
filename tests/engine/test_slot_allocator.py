"""Whatever sequences do, every active slot of the cache holds exactly the tokens of its owner."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mars_ray.engine.kv.slot_allocator import FIRST_WIDTH, Copy, Resize, SlotAllocator
from tests.engine.engine_parts import ShadowCache, slot_of

MASK = -1
BASES = [[base * 10 + (number * number) % 7 for number in range(1100)] for base in range(3)]
LENGTHS = st.one_of(st.integers(1, 40), st.integers(1, 1100), st.sampled_from([255, 256, 257, 511, 512, 513, 1024]))
ENDS = st.lists(st.integers(40, 42), max_size=3)
WHICH = st.integers(0, 7)


@dataclass(eq=False)
class Owner:
    tokens: list[int]
    num_computed_tokens: int = 0
    slot: int | None = None
    tenant: str = ""
    reuses_cache: bool = True


class Slots(RuleBasedStateMachine):
    """`longest` tokens a sequence, tokens in plain lists where the engine has tensors."""

    @initialize(
        longest=st.sampled_from([1024, 300, 20]),
        spare=st.sampled_from([0, 300, 1024, 3000]),
        max_slots=st.sampled_from([8, 3, 1]),
    )
    def start(self, longest: int, spare: int, max_slots: int) -> None:
        self.longest, self.max_tokens, self.max_slots = longest, longest + spare, max_slots
        self.slots = SlotAllocator(max_tokens=self.max_tokens, max_slots=max_slots, max_model_len=longest)
        self.shadow = ShadowCache()
        self.owners: list[Owner] = []

    def apply(self) -> None:
        self.shadow.apply(self.slots.operations)
        self.slots.operations.clear()

    @rule(base=st.integers(0, 2), length=LENGTHS, end=ENDS)
    def allocate(self, base: int, length: int, end: list[int]) -> None:
        """Prompts share beginnings of all lengths."""
        owner = Owner([*BASES[base][:length], *end][: self.longest])
        if len(self.owners) >= self.slots.slots_at(max(len(owner.tokens), self.slots.width)):
            return
        self.slots.widen(len(owner.tokens))
        held, soon = self.slots.shared_prefix(owner)
        self.slots.allocate(owner)
        self.owners.append(owner)
        assert owner.num_computed_tokens == held <= soon < len(owner.tokens)

    @rule(which=WHICH, count=LENGTHS, masks=st.integers(0, 9))
    def feed(self, which: int, count: int, masks: int) -> None:
        """Masks behind the tokens leave something in the slot that does not count."""
        if self.owners:
            self.apply()
            owner = self.owners[which % len(self.owners)]
            count = min(count, len(owner.tokens) - owner.num_computed_tokens)
            fed = owner.tokens[owner.num_computed_tokens : owner.num_computed_tokens + count] + [MASK] * masks
            self.shadow.write(
                slot_of(owner), owner.num_computed_tokens, fed[: self.slots.width - owner.num_computed_tokens]
            )
            owner.num_computed_tokens += count

    @rule(which=WHICH, count=LENGTHS, token=st.integers(40, 42))
    def generate(self, which: int, count: int, token: int) -> None:
        if self.owners:
            owner = self.owners[which % len(self.owners)]
            room = min(self.longest, self.slots.width) - len(owner.tokens)
            owner.tokens += [token] * min(count, room)

    @rule(which=WHICH)
    def free(self, which: int) -> None:
        if self.owners:
            owner = self.owners.pop(which % len(self.owners))
            self.slots.free(owner)
            assert owner.slot is None

    @rule(length=LENGTHS)
    def widen(self, length: int) -> None:
        length = min(length, self.longest)
        if len(self.owners) <= self.slots.slots_at(length):
            self.slots.widen(length)
            assert self.slots.width >= length

    @rule(length=LENGTHS)
    def narrow(self, length: int) -> None:
        length = min(self.longest, max([length, *(len(owner.tokens) for owner in self.owners)]))
        before = self.slots.num_slots
        self.slots.narrow(length)
        assert self.slots.num_slots >= before
        assert self.slots.width >= length or self.slots.num_slots == before

    @rule(seed=st.integers(0, 2**32))
    def storm(self, seed: int) -> None:
        """Many moves at once."""
        random = Random(seed)
        for _ in range(40):
            length = random.choice([random.randint(1, 40), random.randint(1, 1100), 255, 256, 257, 512, 513])
            which = random.randint(0, 7)
            match random.choice(["allocate", "allocate", "feed", "feed", "generate", "free", "widen", "narrow"]):
                case "allocate":
                    self.allocate(random.randint(0, 2), length, [40] * random.randint(0, 2))
                case "feed":
                    self.feed(which, length, random.randint(0, 9))
                case "generate":
                    self.generate(which, length, random.randint(40, 42))
                case "free":
                    self.free(which)
                case "widen":
                    self.widen(min(length, random.choice([300, 1100])))
                case "narrow":
                    self.narrow(length)
            self.active_slots_hold_the_tokens_of_their_owners()
            self.active_slots_have_one_owner_each()
            self.the_cache_is_never_larger_than_it_may_be()

    @invariant()
    def active_slots_hold_the_tokens_of_their_owners(self) -> None:
        self.apply()
        for owner in self.owners:
            computed = owner.num_computed_tokens
            assert self.shadow.slots[slot_of(owner)][:computed] == owner.tokens[:computed]
            assert self.slots.owner(slot_of(owner)) is owner

    @invariant()
    def active_slots_have_one_owner_each(self) -> None:
        owned = [slot for slot in range(self.slots.num_slots) if self.slots.owner(slot) is not None]
        assert sorted(slot_of(owner) for owner in self.owners) == owned
        assert self.slots.used_tokens == sum(owner.num_computed_tokens for owner in self.owners)

    @invariant()
    def the_cache_is_never_larger_than_it_may_be(self) -> None:
        assert (len(self.shadow.slots), self.shadow.width) == (self.slots.num_slots, self.slots.width)
        assert self.slots.num_slots * self.slots.width <= self.max_tokens
        assert 1 <= self.slots.num_slots <= self.max_slots
        assert self.slots.width <= self.longest


def test_every_active_slot_holds_the_tokens_of_its_owner_whatever_happens() -> None:
    run_state_machine_as_test(Slots, settings=settings(stateful_step_count=20))


@given(
    longest=st.sampled_from([1024, 300, 20]),
    spare=st.sampled_from([0, 300, 1024, 3000]),
    max_slots=st.sampled_from([8, 3, 1]),
    seed=st.integers(0, 2**32),
)
def test_slots_hold_what_they_should_after_many_moves(seed: int, **sizes: int) -> None:
    machine = Slots()
    machine.start(**sizes)
    for number in range(4):
        machine.storm(seed + number)


def filled(slots: SlotAllocator, tokens: list[int]) -> Owner:
    owner = Owner(list(tokens))
    slots.allocate(owner)
    owner.num_computed_tokens = len(tokens)
    return owner


def one_width(max_slots: int = 3) -> SlotAllocator:
    slots = SlotAllocator(max_tokens=FIRST_WIDTH * max_slots, max_slots=max_slots, max_model_len=FIRST_WIDTH)
    slots.operations.clear()
    return slots


def test_a_sequence_takes_over_what_another_left_without_copying_it() -> None:
    slots = one_width()
    first, second = filled(slots, [1, 2, 3, 4]), filled(slots, [9])
    slots.free(first)
    slots.operations.clear()
    again = Owner([1, 2, 3, 5])
    slots.allocate(again)
    assert again.num_computed_tokens == 3
    assert not any(isinstance(operation, Copy) for operation in slots.operations)
    assert {again.slot, second.slot} == {0, 1}


def test_a_sequence_copies_the_prefix_of_one_that_still_runs() -> None:
    slots = one_width()
    filled(slots, [1, 2, 3, 4])
    second = Owner([1, 2, 3, 4])
    slots.allocate(second)
    assert second.num_computed_tokens == 3, "the last token is fed to get logits"
    assert Copy(0, 1, 3) in slots.operations


def test_what_was_used_least_recently_goes_first() -> None:
    slots = one_width()
    for tokens in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
        slots.free(filled(slots, tokens))
    newcomer = Owner([4, 4, 4])
    slots.allocate(newcomer)
    assert [slots.shared_prefix(Owner([base] * 4))[0] for base in (1, 2, 3)] == [0, 3, 3]


def test_the_end_of_a_sequence_moves_no_other() -> None:
    slots = one_width()
    owners = [filled(slots, [base] * 5) for base in (1, 2, 3)]
    slots.operations.clear()
    slots.free(owners[0])
    assert [owner.slot for owner in owners] == [None, 1, 2]
    assert slots.operations == []


def test_a_sequence_in_a_slot_that_goes_moves_to_one_that_stays() -> None:
    slots = SlotAllocator(max_tokens=1024, max_slots=8, max_model_len=1024)
    owners = [filled(slots, [base] * 5) for base in (1, 2, 3, 4)]
    for owner in owners[:3]:
        slots.free(owner)
    slots.operations.clear()
    slots.widen(512)
    assert owners[3].slot == 0
    assert slots.operations == [Copy(3, 0, 5), Resize(2, 512)]


def test_a_neighbour_that_is_still_reading_is_announced() -> None:
    slots = one_width()
    reading = Owner(list(range(100)))
    slots.allocate(reading)
    reading.num_computed_tokens = 30
    assert slots.shared_prefix(Owner(list(range(100)))) == (30, 99)


def test_the_same_memory_holds_fewer_wider_slots() -> None:
    slots = SlotAllocator(max_tokens=2048, max_slots=99, max_model_len=2048)
    assert [slots.slots_at(length) for length in (1, 256, 257, 512, 1024, 2048)] == [8, 8, 4, 4, 2, 1]


def test_what_narrow_slots_cut_off_is_no_longer_shared() -> None:
    slots = SlotAllocator(max_tokens=1024, max_slots=8, max_model_len=1024)
    slots.widen(1000)
    slots.free(filled(slots, BASES[0][:1000]))
    slots.narrow(10)
    slots.widen(1000)
    assert slots.shared_prefix(Owner(BASES[0][:1000])) == (FIRST_WIDTH, FIRST_WIDTH)


def test_cleared_slots_hold_nothing_and_start_narrow() -> None:
    slots = SlotAllocator(max_tokens=1024, max_slots=8, max_model_len=1024)
    slots.widen(1024)
    slots.free(filled(slots, [1, 2, 3]))
    slots.clear()
    assert slots.shared_prefix(Owner([1, 2, 3])) == (0, 0)
    assert slots.operations == [Resize(4, 256)]


def test_misuse_is_an_assertion() -> None:
    slots = one_width(max_slots=1)
    owner = filled(slots, [1])
    with pytest.raises(AssertionError, match="no slot is free"):
        slots.allocate(Owner([2]))
    with pytest.raises(AssertionError, match="only the owner"):
        slots.free(Owner([1], slot=owner.slot))
    with pytest.raises(AssertionError, match="full length"):
        SlotAllocator(max_tokens=10, max_slots=1, max_model_len=11)
    with pytest.raises(AssertionError, match="in use"):
        slots.clear()


def test_nothing_is_shared_between_tenants_whether_it_runs_or_was_left_behind() -> None:
    slots = SlotAllocator(max_tokens=1024, max_slots=4, max_model_len=256)
    filled(slots, [1, 2, 3])
    slots.free(filled(slots, [4, 5, 6]))
    for tokens in ([1, 2, 3, 9], [4, 5, 6, 9]):
        assert slots.shared_prefix(Owner(tokens, tenant="other")) == (0, 0)
        other = Owner(tokens, tenant="other")
        slots.allocate(other)
        assert other.num_computed_tokens == 0
        slots.free(other)
        assert slots.shared_prefix(Owner(tokens))[0] == 3
