"""Whatever arrives and leaves, every sequence is fed in order, ends once, and never waits for ever."""

from collections import Counter
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mars_ray.engine.kv.slots import FIRST_WIDTH, KVRows
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.sampling.commit import advance
from mars_ray.engine.sampling.verify import Walk
from mars_ray.engine.scheduling.scheduler import DECODE_TOKENS, WORTH_WAITING_TOKENS, Feed, Scheduler
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import QueueFullError, RequestError
from tests.engine.engine_parts import ShadowCache, sequence_of

MASK = 1016
ALONE = (ServiceClass(),)
TWO = (ServiceClass(name="gold", share=3), ServiceClass(name="batch"))
RANKED = (ServiceClass(name="gold", priority=1), ServiceClass(name="silver", share=0.6), ServiceClass(name="batch"))
"""None holds a share of the queue that is no whole number of places."""
BASES = [[20 + base * 10 + (number * number) % 7 for number in range(700)] for base in range(2)]


def masks_for(sequence: Sequence) -> int:
    block = sequence.request.decode.block or 1
    return max(0, min(block, sequence.limit - sequence.generated - len(sequence.drafts)) - 1)


def any_walk(feed: Feed, random: Random) -> Walk:
    """What some network might say: tokens that share prefixes easily, drafts that are right or wrong."""
    sequence, token = feed.sequence, random.choice([20, 21, 27])
    agreed = random.randint(0, feed.drafts)
    drafted = [random.choice([20, 21, 27]) for _ in range(random.randint(0, feed.masks))]
    kept = [*sequence.drafts[:agreed], token][: sequence.limit - sequence.generated]
    if agreed < feed.drafts or len(kept) <= agreed:
        drafted = []
    return Walk(kept, drafted, [0.5] * len(drafted), agreed=min(agreed, len(kept)))


class Scheduling(RuleBasedStateMachine):
    """The network is a die, the tensors of the cache are plain lists; the rest is real."""

    @initialize(
        longest=st.sampled_from([600, 300, 40]),
        spare=st.sampled_from([0, 200, 600, 1500]),
        rows_max=st.sampled_from([5, 2, 1]),
        queue_max=st.sampled_from([3, 10]),
        prefill_tokens=st.sampled_from([100, 512, 20, 1]),
        classes=st.sampled_from([ALONE, TWO, RANKED]),
    )
    def start(
        self,
        longest: int,
        spare: int,
        rows_max: int,
        queue_max: int,
        prefill_tokens: int,
        classes: tuple[ServiceClass, ...] = ALONE,
    ) -> None:
        shares = sum(each.share for each in classes)
        self.classes = classes
        self.places = {each.name: max(1, int(queue_max * each.share / shares)) for each in classes}
        self.longest, self.prefill_tokens = longest, prefill_tokens
        self.rows = KVRows(tokens=longest + spare, rows_max=rows_max, longest=longest)
        self.scheduler = Scheduler(
            self.rows, classes=classes, queue_max=queue_max, prefill_tokens=prefill_tokens, clock=count().__next__
        )
        self.shadow = ShadowCache()
        self.live: list[Sequence] = []

    @rule(
        base=st.integers(0, 1),
        length=st.one_of(st.integers(1, 50), st.integers(1, 600)),
        end=st.lists(st.integers(90, 91), max_size=2),
        max_tokens=st.sampled_from([1, 5, 60, 300]),
        mode=st.sampled_from(Mode),
        block=st.integers(1, 6),
        n=st.integers(1, 4),
        of=st.integers(0, 2),
    )
    def add(
        self, base: int, length: int, end: list[int], max_tokens: int, mode: Mode, block: int, n: int, of: int = 0
    ) -> None:
        name = self.classes[of % len(self.classes)].name
        prompt = [*BASES[base][:length], *end][: self.longest - 1]
        limit = min(max_tokens, self.longest - len(prompt))
        decode = DecodeParams(mode=mode, block=1 if mode is Mode.AR else block)
        new = [sequence_of(prompt, decode=decode, limit=limit, n=n, service_class=name) for _ in range(n)]
        before = (list(self.scheduler.waiting), list(self.scheduler.running))
        if self.scheduler.waiting.of(name) + n > self.places[name]:
            never = n > self.places[name]
            with pytest.raises(RequestError if never else QueueFullError, match=str(self.places[name])):
                self.scheduler.add(new)
            assert (list(self.scheduler.waiting), list(self.scheduler.running)) == before
        else:
            self.scheduler.add(new)
            self.live += new

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        if self.live:
            self.scheduler.remove(self.live.pop(which % len(self.live)))

    @rule(seed=st.integers(0, 2**32), times=st.sampled_from([1, 1, 5, 40]))
    def steps(self, seed: int, times: int) -> None:
        random = Random(seed)
        for _ in range(times):
            self.step(random)
            self.rows_hold_what_was_fed()

    @rule(seed=st.integers(0, 2**32))
    def rush(self, seed: int) -> None:
        """Many arrivals with prompts about as long as a row is wide, so that rows grow and run out."""
        random = Random(seed)
        for _ in range(40):
            length, tokens = random.choice([5, 60, 200, 250, 255, 400]), random.choice([5, 30, 300])
            mode, end = random.choice(list(Mode)), [90] * random.randint(0, 2)
            block, n, of = random.randint(1, 6), random.randint(1, 2), random.randint(0, 2)
            self.add(random.randint(0, 1), length, end, tokens, mode, block, n, of)
            if random.random() < 0.2:
                self.cancel(random.randint(0, 9))
            self.every_sequence_is_in_one_place()
            self.steps(random.getrandbits(32), random.choice([1, 3, 10]))

    def step(self, random: Random) -> None:
        # With several classes the oldest may have to give its row to another one.
        oldest = self.scheduler.running[0] if self.scheduler.running and self.classes == ALONE else None
        feeds = self.scheduler.plan(masks_for)
        self.shadow.apply(self.rows.operations)
        self.rows.operations.clear()
        self.check_plan(feeds, oldest)
        for feed in feeds:
            sequence = feed.sequence
            fed = sequence.tokens[sequence.cached : sequence.cached + feed.count]
            fed += sequence.drafts[: feed.drafts] + [MASK] * feed.masks
            self.shadow.write(sequence.row, sequence.cached, fed)
        ended = []
        for feed in feeds:
            if not feed.complete:
                feed.sequence.cached += feed.count
            elif advance(
                feed.sequence, any_walk(feed, random), verified=feed.sequence.request.decode.mode is Mode.EXACT
            ).reason:
                assert feed.sequence.generated == feed.sequence.limit
                ended.append(feed.sequence)
        for sequence in ended:
            self.scheduler.remove(sequence)
            self.live.remove(sequence)  # raises where one ends twice

    def check_plan(self, feeds: list[Feed], oldest: Sequence | None) -> None:
        fed = [feed.sequence for feed in feeds]
        assert len(set(fed)) == len(fed)
        assert bool(feeds) == bool(self.live), "there is something to do as long as anybody lives"
        assert oldest is None or oldest in fed, "the oldest is fed in every step"
        assert all(sequence in self.scheduler.running for sequence in fed)
        assert all(each in fed for each in self.scheduler.running if each.pending <= DECODE_TOKENS)
        for feed in feeds:
            assert 1 <= feed.count <= feed.sequence.pending
            assert feed.sequence.cached + feed.length <= self.rows.width, "what is fed fits its row"
            assert feed.complete or not (feed.drafts or feed.masks)
            if feed.complete:
                assert (feed.drafts, feed.masks) == (len(feed.sequence.drafts), masks_for(feed.sequence))
        assert sum(feed.count for feed in feeds if not feed.short) <= self.prefill_tokens
        short = [feed.short for feed in feeds]
        assert short == sorted(short, reverse=True), "short feeds stand before those that read a prompt"

    @invariant()
    def every_sequence_is_in_one_place(self) -> None:
        waiting, running = list(self.scheduler.waiting), self.scheduler.running
        assert len(waiting) + len(running) == len(self.live) == len(self.live and {*waiting, *running})
        assert {*waiting, *running} == set(self.live)
        assert all(sequence.row is None and sequence.cached == 0 for sequence in waiting)

    @invariant()
    def rows_hold_what_was_fed(self) -> None:
        self.shadow.apply(self.rows.operations)
        self.rows.operations.clear()
        running = self.scheduler.running
        assert sorted(sequence.row for sequence in running) == list(range(self.rows.active))
        for sequence in running:
            assert self.rows.owner(sequence.row) is sequence
            assert self.shadow.rows[sequence.row][: sequence.cached] == sequence.tokens[: sequence.cached]

    def teardown(self) -> None:
        """The oldest gains a token, or reads its share of a prompt, in each step."""
        if hasattr(self, "live"):
            per_prompt = [-(-self.longest // self.prefill_tokens) + each.limit + 1 for each in self.live]
            random = Random(0)
            for _ in range(sum(per_prompt) * (1 if self.classes == ALONE else 4)):
                if self.live:
                    self.step(random)
            assert not self.live
            assert not self.scheduler.waiting and not self.scheduler.running and self.rows.active == 0


def test_every_sequence_ends_once_and_its_row_holds_what_was_fed_whatever_happens() -> None:
    run_state_machine_as_test(Scheduling, settings=settings(max_examples=50, stateful_step_count=12))


@given(
    longest=st.sampled_from([600, 300, 40]),
    spare=st.sampled_from([0, 200, 600, 1500]),
    rows_max=st.sampled_from([5, 2]),
    prefill_tokens=st.sampled_from([512, 100, 20]),
    classes=st.sampled_from([ALONE, TWO, RANKED]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40)
def test_a_rush_of_requests_on_a_small_cache_is_served_to_the_end(seed: int, **sizes: Any) -> None:
    machine = Scheduling()
    machine.start(queue_max=6, **sizes)
    machine.rush(seed)
    machine.teardown()


def scheduler(
    rows: KVRows, prefill_tokens: int = 100, *, classes: tuple[ServiceClass, ...] = ALONE, queue_max: int = 8
) -> Scheduler:
    return Scheduler(rows, classes=classes, queue_max=queue_max, prefill_tokens=prefill_tokens, clock=count().__next__)


def fed(plan: list[Feed]) -> list[tuple[Sequence, int]]:
    return [(feed.sequence, feed.count) for feed in plan]


def commit(plan: list[Feed]) -> None:
    for feed in plan:
        feed.sequence.cached += feed.count
        if feed.sequence.pending == 0:
            feed.sequence.tokens.append(7)


def small_rows(rows_max: int = 4) -> KVRows:
    return KVRows(tokens=4 * FIRST_WIDTH, rows_max=rows_max, longest=4 * FIRST_WIDTH)


def test_a_long_prompt_does_not_hold_up_those_that_decode() -> None:
    plans = scheduler(small_rows())
    short, long = sequence_of([1, 2]), sequence_of(range(5, 235))
    plans.add([short, long])
    seen = []
    for _ in range(3):
        plan = plans.plan(masks_for)
        seen.append({feed.sequence: feed.count for feed in plan})
        commit(plan)
    assert seen == [{short: 2, long: 98}, {short: 1, long: 100}, {short: 1, long: 32}]


def test_a_short_prompt_admitted_behind_a_long_one_stands_before_it() -> None:
    plans = scheduler(small_rows())
    long, short = sequence_of(range(5, 65)), sequence_of([1, 2])
    plans.add([long, short])
    assert fed(plans.plan(masks_for)) == [(short, 2), (long, 60)]


def test_sequences_start_in_the_order_in_which_they_came() -> None:
    plans = scheduler(small_rows(rows_max=2))
    first, second, third = (sequence_of([token] * 20) for token in (1, 2, 3))
    plans.add([first, second, third])
    commit(plans.plan(masks_for))
    assert plans.running == [first, second] and list(plans.waiting) == [third]
    plans.remove(first)
    plans.plan(masks_for)
    assert plans.running == [second, third]


def test_a_prompt_waits_for_a_neighbour_that_is_reading_the_same_one() -> None:
    plans = scheduler(small_rows(), prefill_tokens=60)
    first, second = sequence_of([*range(5, 106), 1]), sequence_of([*range(5, 106), 2])
    plans.add([first, second])
    assert fed(plans.plan(masks_for)) == [(first, 60)]
    commit([Feed(first, 60)])
    assert fed(plans.plan(masks_for)) == [(first, 42)], "it would save more than it costs to wait"
    commit([Feed(first, 42)])
    assert fed(plans.plan(masks_for)) == [(first, 1), (second, 1)]
    assert second.prefix_hit == 101 >= WORTH_WAITING_TOKENS


def test_the_youngest_gives_its_row_back_when_rows_must_grow_and_goes_first_when_there_is_room() -> None:
    plans = scheduler(KVRows(tokens=2 * FIRST_WIDTH, rows_max=2, longest=2 * FIRST_WIDTH), prefill_tokens=1000)
    old, young = sequence_of([1] * FIRST_WIDTH), sequence_of([2] * 20)
    plans.add([old, young])
    commit(plans.plan(masks_for))
    later = sequence_of([3] * 20)
    plans.add([later])
    assert fed(plans.plan(masks_for)) == [(old, 1)]
    assert list(plans.waiting) == [young, later]
    assert plans.preemptions == 1
    plans.remove(old)
    plans.plan(masks_for)
    assert plans.running == [young, later]


def test_a_full_queue_takes_nothing_of_a_request_that_does_not_fit_whole() -> None:
    plans = scheduler(small_rows())
    plans.add([sequence_of([1]) for _ in range(7)])
    with pytest.raises(QueueFullError, match=r"7 sequences wait and 8 may.* 2 more"):
        plans.add([sequence_of([1]), sequence_of([1])])
    assert len(plans.waiting) == 7


def test_there_is_nothing_to_do_without_sequences() -> None:
    assert scheduler(small_rows()).plan(masks_for) == []


def flood(plans: Scheduler, name: str, many: int, first: int) -> list[Sequence]:
    new = [sequence_of([first + number] * 20, limit=1000, service_class=name) for number in range(many)]
    for each in new:
        plans.add([each])
    return new


def run(plans: Scheduler, steps: int, answer: dict[str, int]) -> Counter[str]:
    """Tokens fed by class; a sequence ends once its answer has the length of its class, and others are waiting."""
    fed_tokens: Counter[str] = Counter()
    for _ in range(steps):
        plan = plans.plan(masks_for)
        for feed in plan:
            fed_tokens[feed.sequence.service_class] += feed.count
        commit(plan)
        for feed in plan:
            if feed.sequence.generated >= answer[feed.sequence.service_class]:
                plans.remove(feed.sequence)
    return fed_tokens


@pytest.mark.parametrize("share", [0.1, 1 / 3, 1, 3, 10])
@pytest.mark.parametrize("answer", [{"gold": 20, "batch": 20}, {"gold": 5, "batch": 80}])
def test_a_flood_of_one_class_does_not_keep_another_from_its_share_of_the_tokens(
    share: float, answer: dict[str, int]
) -> None:
    classes = (ServiceClass(name="gold", share=share), ServiceClass(name="batch"))
    cache = KVRows(tokens=8 * FIRST_WIDTH, rows_max=8, longest=4 * FIRST_WIDTH)
    plans = scheduler(cache, prefill_tokens=1000, classes=classes, queue_max=40_000)
    flood(plans, "batch", 1500, first=1)
    run(plans, 100, answer)
    flood(plans, "gold", 3000, first=5000)
    run(plans, 200, answer)  # those that ran when it came end first
    tokens = run(plans, 1000, answer)
    assert tokens["gold"] / tokens["batch"] == pytest.approx(share, rel=0.15)


def test_who_was_not_there_does_not_make_up_for_it() -> None:
    plans = scheduler(
        small_rows(),
        prefill_tokens=1000,
        queue_max=4000,
        classes=(ServiceClass(name="gold"), ServiceClass(name="batch")),
    )
    answer = {"gold": 20, "batch": 20}
    flood(plans, "batch", 900, first=1)
    run(plans, 500, answer)
    flood(plans, "gold", 900, first=5000)
    run(plans, 50, answer)
    tokens = run(plans, 200, answer)
    assert tokens["gold"] / tokens["batch"] == pytest.approx(1, rel=0.2)


def test_a_class_of_higher_priority_takes_every_row_that_comes_free() -> None:
    classes = (ServiceClass(name="gold", priority=1, share=0.1), ServiceClass(name="batch", share=10))
    plans = scheduler(small_rows(), prefill_tokens=1000, classes=classes, queue_max=4000)
    answer = {"gold": 20, "batch": 20}
    flood(plans, "batch", 200, first=1)
    run(plans, 5, answer)
    flood(plans, "gold", 30, first=5000)
    run(plans, 25, answer)
    assert run(plans, 10, answer).keys() == {"gold"}
