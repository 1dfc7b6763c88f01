"""Queues and routing of the simulation decide as those of the engine and of the router do."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.scheduling.waiting_queue import WaitingQueue
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import QueueFullError
from mars_ray.serve.replicas import prefix_routing as routing
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.fleet import FIELDS, Fleet, Queues
from mars_ray.simulate.fluid_fleet import FluidFleet
from mars_ray.simulate.simulator import SLACK, route
from mars_ray.simulate.stepped_fleet import SteppedFleet
from tests.simulate.simulation_samples import machine, run

GOLD, SILVER, BATCH = (
    ServiceClass(name="gold", priority=1),
    ServiceClass(name="silver", share=3),
    ServiceClass(name="batch", share=0.7),
)
some_classes = st.sampled_from([(SILVER,), (SILVER, BATCH), (GOLD, SILVER, BATCH), (BATCH, GOLD)])
numbers = np.array([0])


def both(
    classes: tuple[ServiceClass, ...], queued: list[int], max_waiting_seqs: int = 100
) -> tuple[Queues, WaitingQueue]:
    """The simulation's queues and the engine's, in which the same wait: one a second, of these classes."""
    queues, waiting = Queues(1, classes, max_waiting_seqs), WaitingQueue(classes, max_waiting_seqs)
    for second, number in enumerate(queued):
        request = np.zeros((1, len(FIELDS)))
        request[0, 0] = second
        placed = queues.add(np.array([number]), request)[0]
        try:
            waiting.add([sequence(classes[number], second)])
        except QueueFullError:
            assert not placed
        else:
            assert placed
    return queues, waiting


def sequence(of: ServiceClass, added_s: float) -> Sequence:
    return cast(
        Sequence, SimpleNamespace(service_class=of.name, added_s=added_s, request=SimpleNamespace(partial_answers={}))
    )


@given(classes=some_classes, data=st.data())
def test_the_next_is_that_of_the_engine_whatever_was_served(
    classes: tuple[ServiceClass, ...], data: st.DataObject
) -> None:
    """Classes come, are served, empty their queues and come back."""
    number = st.integers(0, len(classes) - 1)
    queues, waiting = both(classes, [])
    for second in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            of = data.draw(number)
            waiting.add([sequence(classes[of], second)])
            request = np.zeros((1, len(FIELDS)))
            request[0, 0] = second
            queues.add(np.array([of]), request)
        elif waiting.next() is not None:
            turn = queues.next(numbers)
            taken = waiting.take()
            assert classes[turn[0]].name == taken.service_class
            assert queues.pop(turn)[0, 0] == taken.added_s
        of, tokens = data.draw(number), data.draw(st.integers(0, 3))
        waiting.served(classes[of].name, tokens)
        queues.served(np.eye(len(classes))[of][None, :] * tokens)


@given(classes=some_classes, data=st.data(), max_waiting_seqs=st.integers(1, 12))
def test_a_class_has_the_places_it_has_in_the_engine(
    classes: tuple[ServiceClass, ...], data: st.DataObject, max_waiting_seqs: int
) -> None:
    both(classes, data.draw(st.lists(st.integers(0, len(classes) - 1), max_size=30)), max_waiting_seqs)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 50))
def test_a_queue_gives_back_in_the_order_it_took(added: list[int], max_waiting_seqs: int) -> None:
    queues = Queues(3, (SILVER,), max_waiting_seqs)
    replica = np.array(added, dtype=np.int64)
    requests = np.zeros((len(added), len(FIELDS)))
    requests[:, 0] = np.arange(len(added))
    placed = queues.add(replica, requests)
    for number in range(3):
        expected = [place for place, at in enumerate(added) if at == number][:max_waiting_seqs]
        assert np.flatnonzero(placed & (replica == number)).tolist() == expected
        taken = [queues.pop(np.array([number]))[0, 0] for _ in expected]
        assert taken == expected


def test_requests_start_in_the_order_they_came() -> None:
    """With one row, whoever comes first ends first, though it is longest."""
    found = run([Arrival(0.0, 10, 300), Arrival(0.1, 10, 5), Arrival(0.2, 10, 5)], on=machine(max_num_seqs=1))
    ends = [each.second for each in found.seconds for _ in range(each.ended)]
    alone = run([Arrival(0.0, 10, 300)], on=machine(max_num_seqs=1)).metrics.duration_s
    assert len(ends) == 3 and min(ends) > alone


FLEETS = pytest.mark.parametrize("kind", [SteppedFleet, FluidFleet])


def fleet_with(kind: type[Fleet], classes: tuple[ServiceClass, ...], rows: int, came: list[tuple[float, int]]) -> Fleet:
    """One engine in whose queues these requests wait: arrival and class of each."""
    fleet = kind(machine(max_num_seqs=rows, max_waiting_seqs=1000), classes, 1, 0.95, 0)
    fleet.in_flight_N[:] = count = len(came)
    arrival, of_class = (np.array(column) for column in zip(*came, strict=True))
    fleet.add(np.zeros(count, np.int64), of_class, arrival * 1.0, np.full(count, 10.0), np.full(count, 60.0))
    return fleet


@FLEETS
def test_tokens_are_divided_by_share_while_all_want_more(kind: type[Fleet]) -> None:
    fleet = fleet_with(kind, (SILVER, ServiceClass(name="batch")), 4, [(0.0, number % 2) for number in range(400)])
    for tick in range(6000):
        fleet.advance(tick / 200, (tick + 1) / 200)
    assert fleet.queues.waiting.min() > 0, "both want more"
    silver, batch = (fleet.ended_tokens_NC[0] + fleet.ended_NC[0] * 10).tolist()
    assert silver / batch == pytest.approx(3, rel=0.15)


@FLEETS
def test_a_higher_priority_gets_the_next_row(kind: type[Fleet]) -> None:
    fleet = fleet_with(kind, (GOLD, BATCH), 1, [(0.0, 1), (0.1, 1), (0.2, 0)])
    ended = list[list[int]]()
    for tick in range(1000):
        if fleet.advance(tick / 100, (tick + 1) / 100).size:
            ended.append(fleet.ended_NC[0].tolist())
    assert ended == [[1, 0], [1, 1], [1, 2]]


def test_the_router_knows_the_slack_of_the_real_one() -> None:
    assert SLACK == routing.SLACK


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 2**32))
def test_a_request_goes_where_the_router_would_send_it(loads: list[int], seed: int) -> None:
    """Among the replicas, one that has no more than the slack above the least; else the least loaded."""
    in_flight = np.array(loads)
    chosen = int(route(in_flight, np.arange(len(loads)), 1, np.random.default_rng(seed))[0])
    assert loads[chosen] <= min(loads) + routing.SLACK
    assert in_flight[chosen] == loads[chosen] + 1


def test_only_replicas_that_are_up_get_requests() -> None:
    in_flight = np.zeros(6, np.int64)
    chosen = route(in_flight, np.array([1, 4]), 1000, np.random.default_rng(0))
    assert set(chosen.tolist()) == {1, 4}
    assert abs(in_flight[1] - in_flight[4]) <= 2 * routing.SLACK + 2


@pytest.mark.parametrize("replicas", [2, 50, 1000])
def test_load_is_spread_evenly(replicas: int) -> None:
    in_flight = np.zeros(replicas, np.int64)
    route(in_flight, np.arange(replicas), 20 * replicas, np.random.default_rng(0))
    assert in_flight.max() - in_flight.min() <= 2 * (SLACK + 2)
