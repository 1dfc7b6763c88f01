"""Batch work makes way as soon as callers pay for the load, and comes back when they no longer do."""

from dataclasses import replace

import pytest

from mars_ray.control.core.batch_job import Yielding
from mars_ray.control.core.overrides import Override
from mars_ray.control.core.status import ClassStatus, ClusterStatus, ReplicaStatus
from tests.control.control_samples import class_state, engine_state

CLASS = ClassStatus(
    name="standard",
    threshold=0.95,
    floor=0.9,
    floor_asked=0.9,
    floor_reason="",
    ceiling=0.95,
    reason="",
    requests_s=3.0,
    changes=0,
    override=None,
    late_s=0.0,
)
REPLICA = ReplicaStatus(replica="a", age_s=0.5, state=engine_state(class_state(running=4)))
CALM = ClusterStatus(policy="capacity", epoch=1, desired_replicas=1, replicas=(REPLICA,), classes=(CLASS,))
LOWERED = replace(CALM, classes=(CLASS, replace(CLASS, name="gold", threshold=0.9)))
SHORT = {
    "a lowered threshold": LOWERED,
    "a queue": replace(CALM, replicas=(REPLICA, replace(REPLICA, state=engine_state(class_state(waiting=1))))),
    "too few replicas": replace(CALM, desired_replicas=2),
    "no replica yet": replace(CALM, replicas=()),
}


@pytest.mark.parametrize("what", SHORT)
def test_batch_work_yields_at_once(what: str) -> None:
    yielding = Yielding(recover_s=30)
    assert not yielding.follow([CALM], 0)
    assert yielding.follow([CALM, SHORT[what]], 1)


def test_it_goes_on_once_all_was_calm_for_long_enough() -> None:
    yielding = Yielding(recover_s=30)
    assert yielding.follow([LOWERED], 0)
    assert yielding.follow([CALM], 20)
    assert yielding.follow([LOWERED], 25)
    assert [yielding.follow([CALM], now_s) for now_s in (26, 54, 55, 80)] == [True, True, False, False]


def test_it_yields_for_as_long_as_callers_wait_even_without_a_time_to_recover() -> None:
    yielding = Yielding(recover_s=0)
    assert [yielding.follow([each], 1) for each in (LOWERED, CALM, LOWERED)] == [True, False, True]


def test_a_threshold_set_by_hand_is_no_load() -> None:
    by_hand = replace(CALM, classes=(replace(CLASS, threshold=0.9, override=Override(0.9, None)),))
    assert not Yielding(recover_s=30).follow([by_hand], 0)


def test_without_online_classes_nothing_yields() -> None:
    assert not Yielding(recover_s=30).follow([], 0)
