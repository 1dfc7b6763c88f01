"""Who gets the next slot, by class of service."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.scheduling.waiting_queue import WaitingQueue
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import QueueFullError, RequestError
from tests.engine.engine_parts import sequence_of

SHARES = st.lists(st.sampled_from([0.1, 0.25, 0.6, 1.0, 2.0, 7.0]), min_size=2, max_size=4)
ticks = count(1)


def classes_of(shares: list[float]) -> list[ServiceClass]:
    return [ServiceClass(name=f"c{number}", share=share) for number, share in enumerate(shares)]


def arrival(name: str) -> Sequence:
    sequence = sequence_of([1], service_class=name)
    sequence.added_s = float(next(ticks))
    return sequence


def queued(waiting: WaitingQueue, *names: str) -> list[Sequence]:
    """One sequence each, in order of arrival."""
    new = [arrival(name) for name in names]
    for sequence in new:
        waiting.add([sequence])
    return new


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=20), st.data())
def test_within_a_class_who_came_first_is_served_first(names: list[str], data: st.DataObject) -> None:
    waiting = WaitingQueue([ServiceClass(name="a"), ServiceClass(name="b", share=2)], 100)
    arrived, order = queued(waiting, *names), []
    while waiting:
        order.append(waiting.take())
        waiting.served(data.draw(st.sampled_from("ab")), data.draw(st.integers(0, 50)))
    assert waiting.next() is None
    for name in "ab":
        assert [each for each in order if each.service_class == name] == [
            each for each in arrived if each.service_class == name
        ]


def test_of_classes_that_were_served_alike_who_came_first_goes_first() -> None:
    waiting = WaitingQueue(classes_of([1, 1]), 100)
    first, _ = queued(waiting, "c1", "c0")
    assert waiting.next() is first


@given(st.lists(st.sampled_from(["low", "middle", "high"]), min_size=1, max_size=20), st.integers(0, 5))
def test_a_higher_priority_goes_first_whatever_the_shares_and_what_it_was_served(names: list[str], tokens: int) -> None:
    ranks = {"low": -1, "middle": 0, "high": 7}
    waiting = WaitingQueue(
        [ServiceClass(name=name, priority=rank, share=5 - rank / 2) for name, rank in ranks.items()], 1000
    )
    waiting.served("high", tokens)
    queued(waiting, *names)
    order = []
    while waiting:
        order.append(ranks[waiting.take().service_class])
    assert order == sorted(order, reverse=True)


@given(SHARES, st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_with_every_class_backlogged_each_is_served_its_share_of_the_tokens(
    shares: list[float], lengths: list[int]
) -> None:
    waiting = WaitingQueue(classes_of(shares), 10**6)
    for number in range(len(shares)):
        queued(waiting, f"c{number}", f"c{number}")
    served: Counter[int] = Counter()
    while min(served[number] / share for number, share in enumerate(shares)) < 200:
        number = int(waiting.take().service_class[1])
        served[number] += lengths[number]
        waiting.served(f"c{number}", lengths[number])
        queued(waiting, f"c{number}")
    levels = [served[number] / share for number, share in enumerate(shares)]
    most = max(length / share for length, share in zip(lengths, shares, strict=False))
    assert max(levels) - min(levels) <= most, "never further apart than one answer"


def test_who_was_not_there_does_not_make_up_for_it() -> None:
    waiting = WaitingQueue(classes_of([1, 1]), 100)
    queued(waiting, *["c0"] * 40)
    for _ in range(20):
        waiting.served(waiting.take().service_class, 10)
    queued(waiting, *["c1"] * 20)
    order = []
    for _ in range(10):
        order.append(waiting.take().service_class)
        waiting.served(order[-1], 10)
    assert Counter(order) == {"c0": 5, "c1": 5}


def test_a_full_queue_of_one_class_refuses_only_that_class() -> None:
    waiting = WaitingQueue([ServiceClass(name="gold", share=3), ServiceClass(name="batch")], 8)
    queued(waiting, "batch", "batch")
    with pytest.raises(QueueFullError, match="2 waiting sequences, of at most 2"):
        waiting.add([arrival("batch")])
    queued(waiting, *["gold"] * 6)
    with pytest.raises(QueueFullError, match="6 waiting sequences, of at most 6; 2 more"):
        waiting.add([arrival("gold"), arrival("gold")])
    assert (waiting.count("batch"), waiting.count("gold"), len(waiting)) == (2, 6, 8)


def test_a_class_with_the_smallest_share_has_one_place_in_the_queue() -> None:
    waiting = WaitingQueue([ServiceClass(name="gold", share=1000), ServiceClass(name="batch")], 8)
    [only] = queued(waiting, "batch")
    assert list(waiting) == [only]
    with pytest.raises(QueueFullError):
        waiting.add([arrival("batch")])


def test_a_request_with_more_sequences_than_may_ever_wait_is_not_told_to_come_again() -> None:
    waiting = WaitingQueue(classes_of([1, 1]), 8)
    with pytest.raises(RequestError, match="n is 5; at most 4"):
        waiting.add([arrival("c0") for _ in range(5)])


def test_who_is_put_back_goes_before_all_others_of_its_class_even_where_the_queue_is_full() -> None:
    waiting = WaitingQueue(classes_of([1, 1]), 4)
    ran = arrival("c0")
    rest = queued(waiting, "c0", "c0", "c1")
    waiting.put_back(ran)
    assert waiting.next() is ran
    assert list(waiting) == [ran, *rest]
    waiting.remove(ran)
    assert waiting.next() is rest[0]


def test_a_class_that_was_idle_resumes_with_the_classes_of_its_own_priority() -> None:
    waiting = WaitingQueue([ServiceClass(name="gold", priority=1), ServiceClass(name="a"), ServiceClass(name="b")], 100)
    queued(waiting, "a", "a", "gold")
    waiting.take()
    waiting.served("gold", 10**6)
    queued(waiting, "gold")
    waiting.take()
    queued(waiting, "b")
    order = []
    for _ in range(3):
        order.append(waiting.take().service_class)
        waiting.served(order[-1], 10)
    assert "b" in order[:2]


def test_a_class_that_was_idle_does_not_catch_up_on_what_was_served_since_the_last_one_was_taken() -> None:
    waiting = WaitingQueue([ServiceClass(name="a"), ServiceClass(name="b")], 100)
    queued(waiting, "a")
    waiting.take()
    waiting.served("a", 64_000)
    queued(waiting, *"bbaa")
    order = []
    for _ in range(4):
        order.append(waiting.take().service_class)
        waiting.served(order[-1], 10)
    assert sorted(order[:2]) == sorted(order[2:]) == ["a", "b"]
