"""What a replica follows, and for how long; the clock it goes by."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.core.controller import SteadyClock
from mars_ray.control.core.lease import REPORTS_KEPT, Lease, run_heartbeats
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.stats.state import EngineState
from tests.control.control_samples import class_state, directive, engine_state, plan_of
from tests.factories.clock import Clock

PLAN = plan_of(lease_s=5.0, recover_s=30.0)


def started(reports: int = 1) -> tuple[Lease, Clock]:
    """A lease that made reports, a second from one to the next."""
    clock = Clock(50.0)
    lease = Lease("a", PLAN, clock)
    for number in range(reports):
        clock.now_s += number > 0
        lease.report(engine_state())
    return lease, clock


def test_reports_are_numbered_and_go_by_a_clock_of_their_own() -> None:
    clock = Clock(50.0)
    lease = Lease("a", PLAN, clock)
    made = []
    for step_s in (0.0, 1.0, -100.0, 2.0):
        clock.now_s += step_s
        made.append(lease.report(engine_state()))
    assert [each.number for each in made] == [1, 2, 3, 4]
    assert [each.seconds for each in made] == [0.0, 1.0, 1.0, 3.0]


def test_a_directive_holds_until_its_lease_ends_that_began_with_the_report() -> None:
    lease, clock = started()
    clock.now_s += 3
    assert lease.take(directive())
    clock.now_s += 1.9
    assert lease.directive == directive()
    clock.now_s += 0.1
    assert lease.directive is None


def test_an_answer_that_comes_after_its_lease_is_not_taken() -> None:
    lease, clock = started()
    clock.now_s += 5
    assert not lease.take(directive()) and lease.directive is None


def test_a_clock_that_is_set_back_makes_no_lease_longer() -> None:
    lease, clock = started()
    assert lease.take(directive())
    clock.now_s -= 3600
    assert lease.directive is not None
    clock.now_s += 5
    assert lease.directive is None


@pytest.mark.parametrize(
    "wrong",
    [
        directive(replica="b"),
        directive(99),
        directive(threshold=0.4),
        directive(threshold=0.96),
        directive(thresholds={}),
        directive(thresholds={"standard": 0.6, "other": 0.6}),
        directive(thresholds={"other": 0.6}),
    ],
)
def test_what_is_foreign_or_out_of_bounds_changes_nothing(wrong: Directive) -> None:
    lease, _ = started(2)
    assert not lease.take(wrong) and lease.directive is None
    assert lease.take(directive(1))
    assert not lease.take(replace(wrong, answers=max(2, wrong.answers)))
    assert lease.directive == directive(1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_of_answers_in_any_order_only_newer_ones_are_taken(numbers: list[int]) -> None:
    clock = Clock(50.0)
    lease = Lease("a", PLAN, clock)
    for _ in range(5):
        lease.report(engine_state())
    newest = 0
    for number in numbers:
        assert lease.take(directive(number)) == (number > newest)
        newest = max(newest, number)
        assert lease.directive is not None and lease.directive.answers == newest


def test_answers_to_reports_of_long_ago_are_not_taken() -> None:
    clock = Clock(50.0)
    lease = Lease("a", PLAN, clock)
    for _ in range(REPORTS_KEPT + 1):
        lease.report(engine_state())
    assert not lease.take(directive(1)) and lease.take(directive(2))


def test_a_controller_that_was_replaced_is_not_believed_again() -> None:
    lease, _ = started(4)
    assert lease.take(directive(1, controller="first"))
    assert lease.take(directive(2, controller="second"))
    assert not lease.take(directive(3, controller="first"))
    assert lease.directive == directive(2, controller="second")
    assert lease.take(directive(4, controller="second"))


def test_a_late_answer_does_not_lock_the_newest_controller_out_for_good() -> None:
    lease, clock = started(3)
    assert lease.take(directive(1, controller="new"))
    assert lease.take(directive(2, controller="old"))  # late
    assert not lease.take(directive(3, controller="new"))
    clock.now_s += directive(2).lease_s
    report = lease.report(engine_state())
    assert lease.take(directive(report.number, controller="new"))


def test_answers_that_come_after_the_next_heartbeat_are_followed() -> None:
    class Engine:
        def __init__(self) -> None:
            self.told = asyncio.Queue[Mapping[str, float]]()

        async def state(self) -> EngineState:
            return engine_state(class_state(threshold=0.95))

        def set_thresholds(self, by_class: Mapping[str, float]) -> None:
            self.told.put_nowait(by_class)

    async def follow() -> None:
        sent: list[asyncio.Event] = []

        async def send(report: ReplicaReport) -> Directive:
            for earlier in sent:
                earlier.set()
            sent.append(asyncio.Event())
            await sent[-1].wait()
            return directive(report.number)

        engine = Engine()
        beating = asyncio.create_task(run_heartbeats(engine, Lease("a", PLAN), send, every_s=0.01))
        assert await asyncio.wait_for(engine.told.get(), 30) == {"standard": 0.6}
        beating.cancel()

    asyncio.run(follow())


def test_without_a_controller_a_replica_decides_by_its_own_load_within_bounds() -> None:
    clock, threshold, found = Clock(50.0), 0.95, []
    lease = Lease("a", PLAN, clock)
    for _ in range(6):
        state = engine_state(class_state(threshold=threshold, running=4, waiting=200))
        held = lease.in_force(lease.report(state))
        threshold = held.thresholds["standard"]
        found.append(threshold)
        clock.now_s += 1
    assert found == [0.95, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_with_a_controller_a_replica_does_what_it_says() -> None:
    lease, _ = started()
    report = lease.report(engine_state(class_state(running=4, waiting=200)))
    assert lease.take(directive(2, 0.85))
    assert lease.in_force(report).thresholds == {"standard": 0.85}


def test_when_the_controller_falls_silent_a_replica_goes_on_from_what_held() -> None:
    lease, clock = started()
    lease.take(directive(1, 0.6))
    threshold, found = 0.6, []
    for _ in range(50):
        clock.now_s += 1
        held = lease.in_force(lease.report(engine_state(class_state(threshold=threshold))))
        threshold = held.thresholds["standard"]
        found.append(threshold)
    # Four seconds by the lease, then no jump, and back once nothing was asked for so long.
    assert found == [0.6] * 35 + [0.95] * 15


@given(st.lists(st.floats(-1e4, 1e4), max_size=30))
def test_a_steady_clock_adds_up_what_its_clock_goes_forward(steps_s: list[float]) -> None:
    clock = Clock(50.0)
    steady, passed_s = SteadyClock(clock), 0.0
    assert steady() == 0.0
    for step_s in steps_s:
        before_s, last_s = steady(), clock.now_s
        clock.now_s += step_s
        passed_s += max(0.0, clock.now_s - last_s)
        assert before_s <= steady() == pytest.approx(passed_s)
