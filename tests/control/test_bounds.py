"""What the start of `serve` says of how low thresholds may go."""

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.policy import bounds_of, describe_bounds
from mars_ray.engine.service_class import ServiceClass


def said(floor: float, ceiling: float = 1.0, accuracy: tuple[tuple[float, float], ...] = ()) -> str:
    plan = ControlPlan(ceiling=ceiling, classes=(ServiceClass(name="batch", floor=floor),), accuracy=accuracy)
    return describe_bounds("batch", bounds_of(plan, [])["batch"])


def test_the_floor_of_the_class_is_named_where_it_is_what_stops_a_threshold() -> None:
    assert said(0.7) == (
        "class batch: thresholds from 1 down to 0.7, depending on load; no lower, because its floor is 0.7"
    )


def test_what_calibration_found_is_named_where_it_stops_a_threshold_sooner() -> None:
    lost = ((1.0, 0.99), (0.95, 0.985), (0.9, 0.97))
    assert said(0.7, accuracy=lost) == (
        "class batch: thresholds from 1 down to 0.95, depending on load; no lower, because calibration found "
        "0.020 of the right answers lost at 0.9 (its floor is 0.7)"
    )


def test_a_threshold_that_cannot_move_is_said_to_stay() -> None:
    assert said(0.9, ceiling=0.9) == "class batch: threshold 0.9, whatever the load; no lower, because its floor is 0.9"
