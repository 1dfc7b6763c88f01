"""Whatever sequences do, every active row of the cache holds exactly the tokens of its owner."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mars_ray.engine.kv.slots import FIRST_WIDTH, Copy, KVRows, Resize, Swap
from tests.engine.engine_parts import ShadowCache

MASK = -1
BASES = [[base * 10 + (number * number) % 7 for number in range(1100)] for base in range(3)]
LENGTHS = st.one_of(st.integers(1, 40), st.integers(1, 1100), st.sampled_from([255, 256, 257, 511, 512, 513, 1024]))
ENDS = st.lists(st.integers(40, 42), max_size=3)
WHICH = st.integers(0, 7)


@dataclass(eq=False)
class Owner:
    tokens: list[int]
    cached: int = 0
    row: int | None = None
    tenant: str = ""


class Rows(RuleBasedStateMachine):
    """`longest` tokens a sequence, tokens in plain lists where the engine has tensors."""

    @initialize(
        longest=st.sampled_from([1024, 300, 20]),
        spare=st.sampled_from([0, 300, 1024, 3000]),
        rows_max=st.sampled_from([8, 3, 1]),
    )
    def start(self, longest: int, spare: int, rows_max: int) -> None:
        self.longest, self.tokens, self.rows_max = longest, longest + spare, rows_max
        self.rows = KVRows(tokens=self.tokens, rows_max=rows_max, longest=longest)
        self.shadow = ShadowCache()
        self.owners: list[Owner] = []

    def apply(self) -> None:
        self.shadow.apply(self.rows.operations)
        self.rows.operations.clear()

    @rule(base=st.integers(0, 2), length=LENGTHS, end=ENDS)
    def acquire(self, base: int, length: int, end: list[int]) -> None:
        """Prompts share beginnings of all lengths."""
        owner = Owner([*BASES[base][:length], *end][: self.longest])
        if len(self.owners) >= self.rows.rows_at(max(len(owner.tokens), self.rows.width)):
            return
        self.rows.widen(len(owner.tokens))
        held, soon = self.rows.shared(owner)
        self.rows.acquire(owner)
        self.owners.append(owner)
        assert owner.cached == held <= soon < len(owner.tokens)

    @rule(which=WHICH, count=LENGTHS, masks=st.integers(0, 9))
    def feed(self, which: int, count: int, masks: int) -> None:
        """Masks behind the tokens leave something in the row that does not count."""
        if self.owners:
            self.apply()
            owner = self.owners[which % len(self.owners)]
            count = min(count, len(owner.tokens) - owner.cached)
            fed = owner.tokens[owner.cached : owner.cached + count] + [MASK] * masks
            self.shadow.write(owner.row, owner.cached, fed[: self.rows.width - owner.cached])
            owner.cached += count

    @rule(which=WHICH, count=LENGTHS, token=st.integers(40, 42))
    def generate(self, which: int, count: int, token: int) -> None:
        if self.owners:
            owner = self.owners[which % len(self.owners)]
            room = min(self.longest, self.rows.width) - len(owner.tokens)
            owner.tokens += [token] * min(count, room)

    @rule(which=WHICH)
    def release(self, which: int) -> None:
        if self.owners:
            owner = self.owners.pop(which % len(self.owners))
            self.rows.release(owner)
            assert owner.row is None

    @rule(length=LENGTHS)
    def widen(self, length: int) -> None:
        length = min(length, self.longest)
        if len(self.owners) <= self.rows.rows_at(length):
            self.rows.widen(length)
            assert self.rows.width >= length

    @rule(length=LENGTHS)
    def narrow(self, length: int) -> None:
        length = min(self.longest, max([length, *(len(owner.tokens) for owner in self.owners)]))
        before = self.rows.rows
        assert self.rows.narrow(length) == (self.rows.rows > before)
        assert self.rows.width >= length or self.rows.rows == before

    @rule(seed=st.integers(0, 2**32))
    def storm(self, seed: int) -> None:
        """Many moves at once."""
        random = Random(seed)
        for _ in range(40):
            length = random.choice([random.randint(1, 40), random.randint(1, 1100), 255, 256, 257, 512, 513])
            which = random.randint(0, 7)
            match random.choice(["acquire", "acquire", "feed", "feed", "generate", "release", "widen", "narrow"]):
                case "acquire":
                    self.acquire(random.randint(0, 2), length, [40] * random.randint(0, 2))
                case "feed":
                    self.feed(which, length, random.randint(0, 9))
                case "generate":
                    self.generate(which, length, random.randint(40, 42))
                case "release":
                    self.release(which)
                case "widen":
                    self.widen(min(length, random.choice([300, 1100])))
                case "narrow":
                    self.narrow(length)
            self.active_rows_hold_the_tokens_of_their_owners()
            self.active_rows_are_the_first_ones_and_have_one_owner_each()
            self.the_cache_is_never_larger_than_it_may_be()

    @invariant()
    def active_rows_hold_the_tokens_of_their_owners(self) -> None:
        self.apply()
        for owner in self.owners:
            assert self.shadow.rows[owner.row][: owner.cached] == owner.tokens[: owner.cached]
            assert self.rows.owner(owner.row) is owner

    @invariant()
    def active_rows_are_the_first_ones_and_have_one_owner_each(self) -> None:
        assert sorted(owner.row for owner in self.owners) == list(range(self.rows.active))
        free = [row for row in range(self.rows.rows) if self.rows.owner(row) is None]
        assert self.rows.active + len(free) == self.rows.rows
        assert self.rows.used_tokens == sum(owner.cached for owner in self.owners)

    @invariant()
    def the_cache_is_never_larger_than_it_may_be(self) -> None:
        assert (len(self.shadow.rows), self.shadow.width) == (self.rows.rows, self.rows.width)
        assert self.rows.rows * self.rows.width <= self.tokens
        assert 1 <= self.rows.rows <= self.rows_max
        assert self.rows.width <= self.longest


def test_every_active_row_holds_the_tokens_of_its_owner_whatever_happens() -> None:
    run_state_machine_as_test(Rows, settings=settings(max_examples=50, stateful_step_count=20))


@given(
    longest=st.sampled_from([1024, 300, 20]),
    spare=st.sampled_from([0, 300, 1024, 3000]),
    rows_max=st.sampled_from([8, 3, 1]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_rows_hold_what_they_should_after_many_moves(seed: int, **sizes: int) -> None:
    machine = Rows()
    machine.start(**sizes)
    for number in range(4):
        machine.storm(seed + number)


def filled(rows: KVRows, tokens: list[int]) -> Owner:
    owner = Owner(list(tokens))
    rows.acquire(owner)
    owner.cached = len(tokens)
    return owner


def wide_rows(rows_max: int = 3) -> KVRows:
    rows = KVRows(tokens=FIRST_WIDTH * rows_max, rows_max=rows_max, longest=FIRST_WIDTH)
    rows.operations.clear()
    return rows


def test_a_sequence_takes_over_what_another_left_without_copying_it() -> None:
    rows = wide_rows()
    first, second = filled(rows, [1, 2, 3, 4]), filled(rows, [9])
    rows.release(first)
    rows.operations.clear()
    again = Owner([1, 2, 3, 5])
    rows.acquire(again)
    assert again.cached == 3
    assert not any(isinstance(operation, Copy) for operation in rows.operations)
    assert {again.row, second.row} == {0, 1}


def test_a_sequence_copies_the_prefix_of_one_that_still_runs() -> None:
    rows = wide_rows()
    filled(rows, [1, 2, 3, 4])
    second = Owner([1, 2, 3, 4])
    rows.acquire(second)
    assert second.cached == 3, "the last token is fed to get logits"
    assert Copy(0, 1, 3) in rows.operations


def test_what_was_used_least_recently_goes_first() -> None:
    rows = wide_rows()
    for tokens in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
        rows.release(filled(rows, tokens))
    newcomer = Owner([4, 4, 4])
    rows.acquire(newcomer)
    assert [rows.shared(Owner([base] * 4))[0] for base in (1, 2, 3)] == [0, 3, 3]


def test_the_end_of_a_sequence_moves_the_last_active_row_into_its_place() -> None:
    rows = wide_rows()
    owners = [filled(rows, [base] * 5) for base in (1, 2, 3)]
    rows.operations.clear()
    rows.release(owners[0])
    assert [owner.row for owner in owners] == [None, 1, 0]
    assert rows.operations == [Swap(0, 2, 5)]


def test_a_neighbour_that_is_still_reading_is_announced() -> None:
    rows = wide_rows()
    reading = Owner(list(range(100)))
    rows.acquire(reading)
    reading.cached = 30
    assert rows.shared(Owner(list(range(100)))) == (30, 99)


def test_the_same_memory_holds_fewer_wider_rows() -> None:
    rows = KVRows(tokens=2048, rows_max=99, longest=2048)
    assert [rows.rows_at(length) for length in (1, 256, 257, 512, 1024, 2048)] == [8, 8, 4, 4, 2, 1]


def test_what_narrow_rows_cut_off_is_no_longer_shared() -> None:
    rows = KVRows(tokens=1024, rows_max=8, longest=1024)
    rows.widen(1000)
    rows.release(filled(rows, BASES[0][:1000]))
    assert rows.narrow(10)
    rows.widen(1000)
    assert rows.shared(Owner(BASES[0][:1000])) == (FIRST_WIDTH, FIRST_WIDTH)


def test_cleared_rows_hold_nothing_and_start_narrow() -> None:
    rows = KVRows(tokens=1024, rows_max=8, longest=1024)
    rows.widen(1024)
    rows.release(filled(rows, [1, 2, 3]))
    rows.clear()
    assert rows.shared(Owner([1, 2, 3])) == (0, 0)
    assert rows.operations == [Resize(4, 256)]


def test_misuse_is_an_assertion() -> None:
    rows = wide_rows(rows_max=1)
    owner = filled(rows, [1])
    with pytest.raises(AssertionError, match="no row is free"):
        rows.acquire(Owner([2]))
    with pytest.raises(AssertionError, match="only the owner"):
        rows.release(Owner([1], row=owner.row))
    with pytest.raises(AssertionError, match="full length"):
        KVRows(tokens=10, rows_max=1, longest=11)
    with pytest.raises(AssertionError, match="in use"):
        rows.clear()


def test_nothing_is_shared_between_tenants_whether_it_runs_or_was_left_behind() -> None:
    rows = KVRows(tokens=1024, rows_max=4, longest=256)
    filled(rows, [1, 2, 3])
    rows.release(filled(rows, [4, 5, 6]))
    for tokens in ([1, 2, 3, 9], [4, 5, 6, 9]):
        assert rows.shared(Owner(tokens, tenant="other")) == (0, 0)
        other = Owner(tokens, tenant="other")
        rows.acquire(other)
        assert other.cached == 0
        rows.release(other)
        assert rows.shared(Owner(tokens))[0] == 3
