"""Settings of the controller: what cannot be fails when it is read, with the value and what would do."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from mars_ray.control.control_settings import FLOOR, LENIENT_FLOOR, ControlPlan, ControlSettings
from mars_ray.engine.service_class import ServiceClass
from tests.control.control_samples import plan_of


def said(error: pytest.ExceptionInfo[ValidationError]) -> str:
    return str(error.value)


def test_a_misspelt_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ValidationError) as error:
        ControlSettings(policy="capcity")  # type: ignore[arg-type]
    assert all(name in said(error) for name in ("capcity", "fixed", "capacity", "deadline"))


def test_a_floor_above_the_ceiling_is_refused_with_value_and_range() -> None:
    with pytest.raises(ValidationError) as error:
        plan_of(ServiceClass(name="fast", floor=0.97), ceiling=0.9)
    assert "floor of class fast is 0.97; it must be from 0 to the threshold, 0.9" in said(error)


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"headrom": 0.1}, "headrom"), ({"slo": {"ttft": 100}}, "slo.ttft"), ({"Policy": "fixed"}, "Policy")],
)
def test_unknown_names_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError) as error:
        ControlSettings(**fields)  # type: ignore[arg-type]
    assert name in said(error) and "Extra inputs" in said(error)


@pytest.mark.parametrize(
    "fields",
    [
        {"headroom": 1.0},
        {"headroom": -0.1},
        {"recover_s": -1},
        {"in_time_per_accuracy": -1},
        {"in_time_per_accuracy": math.inf},
        {"min_agreement": 1.1},
        {"lease_s": 0},
        {"lease_s": math.inf},
        {"headroom": math.nan},
        {"slo": {"tpot_ms": 0}},
        {"slo": {"ttft_ms": math.nan}},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ControlSettings(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("ceiling", [-0.1, 1.1, math.nan])
def test_the_ceiling_is_a_probability(ceiling: float) -> None:
    with pytest.raises(ValidationError):
        ControlPlan(ceiling=ceiling)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        ControlSettings().headroom = 0.5  # type: ignore[misc]


def test_with_an_adapter_the_usual_floor_is_a_ratio_of_drafts() -> None:
    assert ControlPlan(lenient=True).floor("standard") == LENIENT_FLOOR < FLOOR


@pytest.mark.parametrize(("ceiling", "floor"), [(0.95, FLOOR), (0.8, 0.8)])
def test_a_class_that_names_no_floor_has_the_usual_one_or_the_ceiling_where_that_is_lower(
    ceiling: float, floor: float
) -> None:
    plan = plan_of(ServiceClass(), ServiceClass(name="fast", floor=0.3), ceiling=ceiling)
    assert (plan.floor("standard"), plan.floor("fast")) == (floor, 0.3)
