"""Whatever arrives and leaves, every sequence is scheduled in order, ends once, and never waits for ever."""

from collections import Counter
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mars_ray.engine.drafting.text_drafter import TextDraft
from mars_ray.engine.kv.slot_allocator import FIRST_WIDTH, SlotAllocator
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.sampling.commit import advance
from mars_ray.engine.sampling.verify import Verification
from mars_ray.engine.scheduling.scheduler import (
    DECODE_TOKENS,
    NEAR_S,
    WORTH_WAITING_TOKENS,
    Masks,
    ScheduledSequence,
    Scheduler,
)
from mars_ray.engine.scheduling.sequence import Drafts, Sequence
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import QueueFullError, RequestError
from tests.engine.engine_parts import ShadowCache, sequence_of, slot_of

MASK = 1016
ALONE = (ServiceClass(),)
TWO = (ServiceClass(name="gold", share=3), ServiceClass(name="batch"))
RANKED = (ServiceClass(name="gold", priority=1), ServiceClass(name="silver", share=0.6), ServiceClass(name="batch"))
"""None holds a share of the queue that is no whole number of places."""
BASES = [[20 + base * 10 + (number * number) % 7 for number in range(700)] for base in range(2)]


def masks_for(sequence: Sequence) -> Masks:
    block, drafts = sequence.request.decode.block or 1, len(sequence.drafts.tokens)
    left = sequence.max_tokens - sequence.num_output_tokens - drafts
    count = max(0, min(block, left) - 1)
    fit = drafts + (drafts + 1) * count <= sequence.max_tokens - sequence.num_output_tokens
    every = fit and drafts > 0 and len(sequence.tokens) % 2 == 0
    return (*((number + count) % (count + 1) if every else 0 for number in range(drafts)), count)


def any_outcome(scheduled: ScheduledSequence, random: Random) -> Verification:
    """What some network might say: tokens that share prefixes easily, drafts that are right or wrong."""
    sequence, token = scheduled.sequence, random.choice([20, 21, 27])
    right = random.randint(0, scheduled.num_drafts)
    drafted = [random.choice([20, 21, 27]) for _ in range(random.randint(0, scheduled.masks[right]))]
    verified = [*sequence.drafts.tokens[:right], token][: sequence.max_tokens - sequence.num_output_tokens]
    if len(verified) <= right:
        drafted = []
    accepted = random.randint(0, len(drafted))
    return Verification(
        verified,
        drafted[:accepted],
        [0.5] * accepted,
        Drafts(drafted[accepted:], [0.5] * (len(drafted) - accepted)),
        num_accepted_drafts=min(right, len(verified)),
    )


class Scheduling(RuleBasedStateMachine):
    """The network is a die, the tensors of the cache are plain lists; the rest is real."""

    @initialize(
        longest=st.sampled_from([600, 300, 40]),
        spare=st.sampled_from([0, 200, 600, 1500]),
        max_slots=st.sampled_from([5, 2, 1]),
        max_waiting_seqs=st.sampled_from([3, 10]),
        max_prefill_tokens=st.sampled_from([100, 512, 20, 1]),
        classes=st.sampled_from([ALONE, TWO, RANKED]),
    )
    def start(
        self,
        longest: int,
        spare: int,
        max_slots: int,
        max_waiting_seqs: int,
        max_prefill_tokens: int,
        classes: tuple[ServiceClass, ...] = ALONE,
    ) -> None:
        shares = sum(each.share for each in classes)
        self.classes = classes
        self.places = {each.name: max(1, int(max_waiting_seqs * each.share / shares)) for each in classes}
        self.longest, self.max_prefill_tokens = longest, max_prefill_tokens
        self.slots = SlotAllocator(max_tokens=longest + spare, max_slots=max_slots, max_model_len=longest)
        self.scheduler = Scheduler(
            self.slots,
            classes=classes,
            max_waiting_seqs=max_waiting_seqs,
            max_prefill_tokens=max_prefill_tokens,
            clock=count().__next__,
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
        if self.scheduler.waiting.count(name) + n > self.places[name]:
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
            self.slots_hold_what_was_scheduled()

    @rule(seed=st.integers(0, 2**32))
    def rush(self, seed: int) -> None:
        """Many arrivals with prompts about as long as a slot is wide, so that slots grow and run out."""
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
        # With several classes the oldest may have to give its slot to another one.
        oldest = self.scheduler.running[0] if self.scheduler.running and self.classes == ALONE else None
        batch = self.scheduler.schedule(masks_for)
        self.shadow.apply(self.slots.operations)
        self.slots.operations.clear()
        self.check_batch(batch, oldest)
        for scheduled in batch:
            sequence = scheduled.sequence
            fed = sequence.tokens[sequence.num_computed_tokens : sequence.num_computed_tokens + scheduled.num_tokens]
            fed += sequence.drafts.tokens[: scheduled.num_drafts] + [MASK] * scheduled.num_masks
            self.shadow.write(slot_of(sequence), sequence.num_computed_tokens, fed)
        ended = []
        for scheduled in batch:
            if not scheduled.has_logits:
                scheduled.sequence.num_computed_tokens += scheduled.num_tokens
            elif advance(scheduled.sequence, any_outcome(scheduled, random)).reason:
                assert scheduled.sequence.num_output_tokens == scheduled.sequence.max_tokens
                ended.append(scheduled.sequence)
        for sequence in ended:
            self.scheduler.remove(sequence)
            self.live.remove(sequence)  # raises where one ends twice

    def check_batch(self, batch: list[ScheduledSequence], oldest: Sequence | None) -> None:
        fed = [scheduled.sequence for scheduled in batch]
        assert len(set(fed)) == len(fed)
        assert bool(batch) == bool(self.live), "there is something to do as long as anybody lives"
        assert oldest is None or oldest in fed, "the oldest takes part in every step"
        assert all(sequence in self.scheduler.running for sequence in fed)
        assert all(each in fed for each in self.scheduler.running if each.num_pending_tokens <= DECODE_TOKENS)
        for scheduled in batch:
            assert 1 <= scheduled.num_tokens <= scheduled.sequence.num_pending_tokens
            reach = scheduled.sequence.num_computed_tokens + scheduled.num_positions
            assert reach <= self.slots.width, "what is scheduled fits its slot"
            assert scheduled.has_logits or not (scheduled.num_drafts or scheduled.num_masks)
            if scheduled.has_logits:
                drafts = len(scheduled.sequence.drafts.tokens)
                assert (scheduled.num_drafts, scheduled.masks) == (drafts, masks_for(scheduled.sequence))
        assert sum(scheduled.num_tokens for scheduled in batch if not scheduled.is_decode) <= self.max_prefill_tokens
        short = [scheduled.is_decode for scheduled in batch]
        assert short == sorted(short, reverse=True), "decoding sequences stand before those that read a prompt"

    @invariant()
    def every_sequence_is_in_one_place(self) -> None:
        waiting, running = list(self.scheduler.waiting), self.scheduler.running
        assert len(waiting) + len(running) == len(self.live) == len(self.live and {*waiting, *running})
        assert {*waiting, *running} == set(self.live)
        assert all(sequence.slot is None and sequence.num_computed_tokens == 0 for sequence in waiting)

    @invariant()
    def slots_hold_what_was_scheduled(self) -> None:
        self.shadow.apply(self.slots.operations)
        self.slots.operations.clear()
        running = self.scheduler.running
        assert sum(self.slots.owner(slot) is not None for slot in range(self.slots.num_slots)) == len(running)
        for sequence in running:
            assert self.slots.owner(slot_of(sequence)) is sequence
            computed = sequence.num_computed_tokens
            assert self.shadow.slots[slot_of(sequence)][:computed] == sequence.tokens[:computed]

    def teardown(self) -> None:
        """The oldest gains a token, or reads its share of a prompt, in each step."""
        if hasattr(self, "live"):
            per_prompt = [-(-self.longest // self.max_prefill_tokens) + each.max_tokens + 1 for each in self.live]
            random = Random(0)
            for _ in range(sum(per_prompt) * (1 if self.classes == ALONE else 4)):
                if self.live:
                    self.step(random)
            assert not self.live
            assert not self.scheduler.waiting and not self.scheduler.running and self.slots.used_tokens == 0


def test_every_sequence_ends_once_and_its_slot_holds_what_was_scheduled_whatever_happens() -> None:
    run_state_machine_as_test(Scheduling, settings=settings(stateful_step_count=12))


@given(
    longest=st.sampled_from([600, 300, 40]),
    spare=st.sampled_from([0, 200, 600, 1500]),
    max_slots=st.sampled_from([5, 2]),
    max_prefill_tokens=st.sampled_from([512, 100, 20]),
    classes=st.sampled_from([ALONE, TWO, RANKED]),
    seed=st.integers(0, 2**32),
)
def test_a_rush_of_requests_on_a_small_cache_is_served_to_the_end(seed: int, **sizes: Any) -> None:
    machine = Scheduling()
    machine.start(max_waiting_seqs=6, **sizes)
    machine.rush(seed)
    machine.teardown()


def make_scheduler(
    slots: SlotAllocator,
    max_prefill_tokens: int = 100,
    *,
    classes: tuple[ServiceClass, ...] = ALONE,
    max_waiting_seqs: int = 8,
) -> Scheduler:
    return Scheduler(
        slots,
        classes=classes,
        max_waiting_seqs=max_waiting_seqs,
        max_prefill_tokens=max_prefill_tokens,
        clock=count().__next__,
    )


def tokens_of(batch: list[ScheduledSequence]) -> list[tuple[Sequence, int]]:
    return [(scheduled.sequence, scheduled.num_tokens) for scheduled in batch]


def commit(batch: list[ScheduledSequence]) -> None:
    for scheduled in batch:
        scheduled.sequence.num_computed_tokens += scheduled.num_tokens
        if scheduled.sequence.num_pending_tokens == 0:
            scheduled.sequence.tokens.append(7)


def small_cache(max_slots: int = 4) -> SlotAllocator:
    return SlotAllocator(max_tokens=4 * FIRST_WIDTH, max_slots=max_slots, max_model_len=4 * FIRST_WIDTH)


def test_a_long_prompt_does_not_hold_up_those_that_decode() -> None:
    scheduler = make_scheduler(small_cache())
    short, long = sequence_of([1, 2]), sequence_of(range(5, 235))
    scheduler.add([short, long])
    seen = []
    for _ in range(3):
        batch = scheduler.schedule(masks_for)
        seen.append({scheduled.sequence: scheduled.num_tokens for scheduled in batch})
        commit(batch)
    assert seen == [{short: 2, long: 98}, {short: 1, long: 100}, {short: 1, long: 32}]


def test_a_short_prompt_admitted_behind_a_long_one_stands_before_it() -> None:
    scheduler = make_scheduler(small_cache())
    long, short = sequence_of(range(5, 65)), sequence_of([1, 2])
    scheduler.add([long, short])
    assert tokens_of(scheduler.schedule(masks_for)) == [(short, 2), (long, 60)]


def test_sequences_start_in_the_order_in_which_they_came() -> None:
    scheduler = make_scheduler(small_cache(max_slots=2))
    first, second, third = (sequence_of([token] * 20) for token in (1, 2, 3))
    scheduler.add([first, second, third])
    commit(scheduler.schedule(masks_for))
    assert scheduler.running == [first, second] and list(scheduler.waiting) == [third]
    scheduler.remove(first)
    scheduler.schedule(masks_for)
    assert scheduler.running == [second, third]


def test_a_prompt_waits_for_a_neighbour_that_is_reading_the_same_one() -> None:
    scheduler = make_scheduler(small_cache(), max_prefill_tokens=60)
    first, second = sequence_of([*range(5, 106), 1]), sequence_of([*range(5, 106), 2])
    scheduler.add([first, second])
    assert tokens_of(scheduler.schedule(masks_for)) == [(first, 60)]
    commit([ScheduledSequence(first, 60)])
    assert tokens_of(scheduler.schedule(masks_for)) == [(first, 42)], "it would save more than it costs to wait"
    commit([ScheduledSequence(first, 42)])
    assert tokens_of(scheduler.schedule(masks_for)) == [(first, 1), (second, 1)]
    assert second.num_cached_tokens == 101 >= WORTH_WAITING_TOKENS


def test_drafts_from_text_are_given_up_before_a_sequence_loses_its_slot_for_them() -> None:
    scheduler = make_scheduler(
        SlotAllocator(max_tokens=2 * FIRST_WIDTH, max_slots=2, max_model_len=2 * FIRST_WIDTH), max_prefill_tokens=1000
    )
    old, young = sequence_of([1] * (FIRST_WIDTH - 4)), sequence_of([2] * 20)
    scheduler.add([old, young])
    commit(scheduler.schedule(masks_for))
    text = TextDraft([1] * 9, [0.9] * 9, [(1.0,)] * 9)
    old.drafts = Drafts(text.tokens, text.confidences, text)
    assert tokens_of(scheduler.schedule(masks_for)) == [(old, 1), (young, 1)]
    assert scheduler.preemptions == 0
    assert not old.drafts.tokens


def test_the_youngest_gives_its_slot_back_when_slots_must_grow_and_goes_first_when_there_is_room() -> None:
    scheduler = make_scheduler(
        SlotAllocator(max_tokens=2 * FIRST_WIDTH, max_slots=2, max_model_len=2 * FIRST_WIDTH), max_prefill_tokens=1000
    )
    old, young = sequence_of([1] * FIRST_WIDTH), sequence_of([2] * 20)
    scheduler.add([old, young])
    commit(scheduler.schedule(masks_for))
    later = sequence_of([3] * 20)
    scheduler.add([later])
    assert tokens_of(scheduler.schedule(masks_for)) == [(old, 1)]
    assert list(scheduler.waiting) == [young, later]
    assert scheduler.preemptions == 1
    scheduler.remove(old)
    scheduler.schedule(masks_for)
    assert scheduler.running == [young, later]


def test_a_full_queue_takes_nothing_of_a_request_that_does_not_fit_whole() -> None:
    scheduler = make_scheduler(small_cache())
    scheduler.add([sequence_of([1]) for _ in range(7)])
    with pytest.raises(QueueFullError, match="7 waiting sequences, of at most 8; 2 more"):
        scheduler.add([sequence_of([1]), sequence_of([1])])
    assert len(scheduler.waiting) == 7


def test_there_is_nothing_to_do_without_sequences() -> None:
    assert make_scheduler(small_cache()).schedule(masks_for) == []


def flood(scheduler: Scheduler, name: str, many: int, first: int) -> list[Sequence]:
    new = [sequence_of([first + number] * 20, limit=1000, service_class=name) for number in range(many)]
    for each in new:
        scheduler.add([each])
    return new


def run(scheduler: Scheduler, steps: int, answer: dict[str, int]) -> Counter[str]:
    """Tokens scheduled by class; a sequence ends once its answer has the length of its class."""
    tokens: Counter[str] = Counter()
    for _ in range(steps):
        batch = scheduler.schedule(masks_for)
        for scheduled in batch:
            tokens[scheduled.sequence.service_class] += scheduled.num_tokens
        commit(batch)
        for scheduled in batch:
            if scheduled.sequence.num_output_tokens >= answer[scheduled.sequence.service_class]:
                scheduler.remove(scheduled.sequence)
    return tokens


@pytest.mark.parametrize("share", [0.1, 1 / 3, 1, 3, 10])
@pytest.mark.parametrize("answer", [{"gold": 20, "batch": 20}, {"gold": 5, "batch": 80}])
def test_a_flood_of_one_class_does_not_keep_another_from_its_share_of_the_tokens(
    share: float, answer: dict[str, int]
) -> None:
    classes = (ServiceClass(name="gold", share=share), ServiceClass(name="batch"))
    cache = SlotAllocator(max_tokens=8 * FIRST_WIDTH, max_slots=8, max_model_len=4 * FIRST_WIDTH)
    scheduler = make_scheduler(cache, max_prefill_tokens=1000, classes=classes, max_waiting_seqs=40_000)
    flood(scheduler, "batch", 1500, first=1)
    run(scheduler, 100, answer)
    flood(scheduler, "gold", 3000, first=5000)
    run(scheduler, 200, answer)  # those that ran when it came end first
    tokens = run(scheduler, 1000, answer)
    assert tokens["gold"] / tokens["batch"] == pytest.approx(share, rel=0.15)


def test_a_class_of_higher_priority_takes_every_slot_that_comes_free() -> None:
    classes = (ServiceClass(name="gold", priority=1, share=0.1), ServiceClass(name="batch", share=10))
    scheduler = make_scheduler(small_cache(), max_prefill_tokens=1000, classes=classes, max_waiting_seqs=4000)
    answer = {"gold": 20, "batch": 20}
    flood(scheduler, "batch", 200, first=1)
    run(scheduler, 5, answer)
    flood(scheduler, "gold", 30, first=5000)
    run(scheduler, 25, answer)
    assert run(scheduler, 10, answer).keys() == {"gold"}


PRIORITIES = (ServiceClass(name="standard"), ServiceClass(name="batch", priority=-1))


def test_a_waiting_caller_takes_the_slot_of_the_youngest_sequence_of_lower_priority() -> None:
    scheduler = make_scheduler(small_cache(max_slots=2), classes=PRIORITIES)
    old, young = (sequence_of([token] * 5, service_class="batch") for token in (1, 2))
    scheduler.add([old, young])
    commit(scheduler.schedule(masks_for))
    caller = sequence_of([3] * 5, service_class="standard")
    scheduler.add([caller])
    assert {sequence for sequence, _ in tokens_of(scheduler.schedule(masks_for))} == {old, caller}
    assert list(scheduler.waiting) == [young]
    scheduler.remove(caller)
    assert young in {sequence for sequence, _ in tokens_of(scheduler.schedule(masks_for))}


def test_no_sequence_gives_way_to_one_of_its_own_priority() -> None:
    scheduler = make_scheduler(small_cache(max_slots=2))
    scheduler.add([sequence_of([token] * 5) for token in (1, 2, 3)])
    commit(scheduler.schedule(masks_for))
    scheduler.schedule(masks_for)
    assert scheduler.preemptions == 0


@pytest.mark.parametrize(("seconds_each", "joining", "near"), [(0.0, 3, 3), (0.024, 2, 3), (0.6, 0, 2), (1.5, 0, 1)])
def test_sequences_of_lower_priority_decode_beside_callers_only_as_far_as_steps_stay_short(
    seconds_each: float, joining: int, near: int
) -> None:
    now_s = 0.0
    scheduler = Scheduler(
        small_cache(),
        classes=PRIORITIES,
        max_waiting_seqs=8,
        max_prefill_tokens=100,
        step_s=lambda batch: 1 + seconds_each * (len(batch) - 1),
        clock=lambda: now_s,
    )
    rows = [sequence_of([token] * 5, service_class="batch") for token in (1, 2, 3)]
    scheduler.add(rows[:1])
    commit(scheduler.schedule(masks_for))
    scheduler.add(rows[1:])
    commit(scheduler.schedule(masks_for))
    caller = sequence_of([4] * 5, service_class="standard")
    scheduler.add([caller])
    commit(scheduler.schedule(masks_for))
    assert tokens_of(scheduler.schedule(masks_for)) == [(caller, 1), *((sequence, 1) for sequence in rows[:joining])]
    scheduler.remove(caller)
    assert len(tokens_of(scheduler.schedule(masks_for))) == near, "the next caller may be near"
    now_s += NEAR_S
    assert len(tokens_of(scheduler.schedule(masks_for))) == 3, "they go on once no caller is near"


def token_s(batch: list[ScheduledSequence]) -> float:
    """The time of a step that takes 1 s, and 1 ms for each token beyond the first."""
    return 1 + 0.001 * (sum(scheduled.num_tokens for scheduled in batch) - 1)


def test_prompts_of_lower_priority_are_read_beside_callers_only_as_far_as_steps_stay_short() -> None:
    scheduler = Scheduler(small_cache(), classes=PRIORITIES, max_waiting_seqs=8, max_prefill_tokens=200, step_s=token_s)
    running, waiting, last = (sequence_of([token] * 250, service_class="batch") for token in (1, 2, 3))
    scheduler.add([running])
    commit(scheduler.schedule(masks_for))
    caller = sequence_of([4] * 5, service_class="standard")
    scheduler.add([caller])
    scheduler.add([waiting, last])
    steps = []
    for _ in range(3):
        batch = scheduler.schedule(masks_for)
        steps.append({scheduled.sequence: scheduled.num_tokens for scheduled in batch})
        commit(batch)
    assert steps == [{caller: 5, running: 50}, *2 * [{caller: 1, running: 1, waiting: 49}]]
    assert list(scheduler.waiting) == [last], "it would not be read, so it does not start"
    scheduler.remove(caller)
    assert tokens_of(scheduler.schedule(masks_for))[1:] == [(waiting, 152), (last, 48)]


def test_a_caller_does_not_wait_for_a_prefix_that_a_pausing_prompt_reads() -> None:
    scheduler = Scheduler(small_cache(), classes=PRIORITIES, max_waiting_seqs=8, max_prefill_tokens=100, step_s=token_s)
    row = sequence_of([1] * 200, service_class="batch")
    scheduler.add([row])
    commit(scheduler.schedule(masks_for))
    caller = sequence_of([1] * 210, service_class="standard")
    scheduler.add([caller])
    assert (caller, 100) in tokens_of(scheduler.schedule(masks_for))
    assert caller.num_cached_tokens == 100
