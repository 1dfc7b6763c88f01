"""Floors: what was set, and what audit and calibration make of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.policy import SURE_TOKENS, Bounds, bounds_of
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.grid import GRID
from tests.control.control_samples import plan_of, profile


def bounds(plan: ControlPlan, *audits: dict[float, tuple[float, float]]) -> Bounds:
    return bounds_of(plan, [profile(audited=each) for each in audits])["standard"]


def calibrated(*points: tuple[float, float]) -> ControlPlan:
    return ControlPlan(ceiling=0.95, classes=(ServiceClass(floor=0.5),), agreement=points)


def test_without_findings_the_bounds_are_those_that_were_set() -> None:
    assert bounds(plan_of()) == Bounds(0.5, 0.95, 0.5)
    assert bounds(plan_of(), {}) == Bounds(0.5, 0.95, 0.5)


def test_without_a_floor_of_its_own_a_class_keeps_its_ceiling_until_right_answers_were_measured() -> None:
    plan = plan_of(ServiceClass())
    agreement = plan.model_copy(update={"agreement": ((0.95, 1.0), (0.9, 1.0))})
    for unmeasured in (plan, agreement):
        found = bounds(unmeasured)
        assert (found.floor, found.operator_floor) == (0.95, 0.9)
        assert "never measured: calibrate the model on tasks, or set a floor" in found.floor_reason
    accuracy = plan.model_copy(update={"accuracy": ((1.0, 0.8), (0.9, 0.8))})
    fixed = plan.model_copy(update={"settings": plan.settings.model_copy(update={"policy": "deadline"})})
    assert bounds(accuracy) == bounds(fixed) == Bounds(0.9, 0.95, 0.9)


def test_an_audit_that_breaks_the_limit_raises_the_floor_above_it_and_says_so() -> None:
    found = bounds(plan_of(), {0.7: (0.90, 5000.0), 0.8: (0.97, 5000.0)})
    assert (found.floor, found.ceiling) == (0.8, 0.95)
    assert found.floor_reason == "the live audit found 0.900 agreement at 0.7"


def test_a_finding_below_the_floor_that_was_set_changes_nothing() -> None:
    assert bounds(plan_of(ServiceClass(floor=0.7)), {0.5: (0.1, 5000.0)}) == Bounds(0.7, 0.95, 0.7)


def test_a_floor_is_never_raised_above_the_ceiling() -> None:
    found = bounds(plan_of(), {0.98: (0.5, 5000.0)})
    assert (found.floor, found.ceiling) == (0.95, 0.95) and found.choices == (0.95,)


@given(st.floats(0, SURE_TOKENS, exclude_max=True), st.floats(0, 1))
def test_few_audited_tokens_prove_nothing(audited: float, agreement: float) -> None:
    assert bounds(plan_of(), {0.7: (agreement, audited)}) == Bounds(0.5, 0.95, 0.5)


@pytest.mark.parametrize(("agreement", "floor"), [(0.945, 0.5), (0.92, 0.8)])
def test_an_audit_must_be_below_the_limit_by_more_than_chance(agreement: float, floor: float) -> None:
    assert bounds(plan_of(), {0.7: (agreement, 1000.0)}).floor == floor


def test_audits_of_several_replicas_count_together() -> None:
    few = {0.7: (0.85, 150.0)}
    assert bounds(plan_of(), few).floor == 0.5
    assert bounds(plan_of(), few, few, few, few).floor == 0.8
    assert bounds(plan_of(), {0.7: (0.0, 210.0)}, {0.7: (1.0, 21000.0)}).floor == 0.5


def test_calibration_below_the_limit_raises_the_floor() -> None:
    found = bounds(calibrated((0.9, 0.99), (0.8, 0.96), (0.7, 0.9), (0.5, 0.8)))
    assert (found.floor, found.floor_reason) == (0.8, "calibration found 0.900 agreement at 0.7")


def test_thresholds_beside_the_grid_may_be_calibrated() -> None:
    assert bounds(calibrated((0.87, 0.99), (0.82, 0.9))).floor == 0.85


def test_what_is_measured_live_counts_more_than_calibration() -> None:
    assert bounds(calibrated((0.7, 0.9), (0.5, 0.99)), {0.7: (0.99, 5000.0)}).floor == 0.5
    assert bounds(calibrated((0.7, 0.99)), {0.7: (0.8, 5000.0)}).floor == 0.8
    assert bounds(calibrated((0.7, 0.9)), {0.7: (0.99, 50.0)}).floor == 0.85


def test_a_threshold_between_two_calibrated_ones_loses_agreement_in_proportion() -> None:
    assert bounds(calibrated((1.0, 1.0), (0.5, 0.97))).floor == 0.5
    assert bounds(calibrated((1.0, 1.0), (0.5, 0.92))).floor == 0.7


def test_no_threshold_below_those_that_were_calibrated() -> None:
    found = bounds(calibrated((1.0, 1.0), (0.7, 0.99)))
    assert (found.floor, found.floor_reason) == (0.7, "calibration tried no threshold below 0.7")
    accuracy = ControlPlan(ceiling=1.0, classes=(ServiceClass(floor=0.1),), accuracy=((1.0, 0.7), (0.3, 0.7)))
    assert bounds(accuracy).floor == 0.3


AUDITS = st.dictionaries(st.sampled_from(GRID[1:]), st.tuples(st.floats(0, 1), st.floats(0, 1e5)))


@given(AUDITS, st.floats(0, 0.95), st.floats(0, 1))
def test_whatever_was_found_a_floor_is_between_the_one_that_was_set_and_the_ceiling(
    audits: dict[float, tuple[float, float]], floor: float, asked: float
) -> None:
    found = bounds(plan_of(ServiceClass(floor=floor), min_agreement=asked), audits)
    assert floor <= found.floor <= found.ceiling == 0.95
    assert bool(found.floor_reason) == (found.floor > floor)
    assert list(found.choices) == sorted(set(found.choices), reverse=True)
    assert (found.choices[0], found.choices[-1]) == (found.ceiling, found.floor)
    assert set(found.choices[1:-1]) <= set(GRID)


@given(AUDITS, st.floats(0, 1), st.floats(0, 1))
def test_who_asks_for_more_agreement_never_gets_a_lower_floor(
    audits: dict[float, tuple[float, float]], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert bounds(plan_of(min_agreement=low), audits).floor <= bounds(plan_of(min_agreement=high), audits).floor


def test_no_threshold_at_which_more_right_answers_are_lost_than_allowed() -> None:
    accuracy = ((1.0, 0.989), (0.95, 0.992), (0.9, 0.988), (0.85, 0.982), (0.8, 0.974), (0.7, 0.952))
    plan = plan_of(ServiceClass(floor=0.5)).model_copy(update={"accuracy": accuracy})
    found = bounds(plan)
    assert found.floor == 0.85
    assert found.floor_reason == "calibration found 0.015 of the right answers lost at 0.8"
    strict = plan.model_copy(update={"settings": plan.settings.model_copy(update={"max_accuracy_loss": 0.0})})
    assert bounds(strict).floor == 0.95


def test_a_threshold_between_two_calibrated_ones_loses_right_answers_in_proportion() -> None:
    plan = ControlPlan(ceiling=1.0, classes=(ServiceClass(floor=0.1),), accuracy=((1.0, 0.7), (0.3, 0.7), (0.1, 0.66)))
    found = bounds(plan)
    assert (found.floor, found.floor_reason) == (0.3, "calibration found 0.020 of the right answers lost at 0.2")
    smaller = plan.model_copy(update={"accuracy": ((1.0, 0.7), (0.3, 0.7), (0.1, 0.686))})
    assert bounds(smaller).floor == 0.2
