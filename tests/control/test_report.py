"""Reports and directives refuse what cannot be, and say where it is and what would do."""

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.replica_messages import ReplicaReport
from mars_ray.engine.stats.state import EngineState, ModelledSteps, RestartCount
from mars_ray.errors import ReportError
from tests.control.control_samples import PROFILE, STEP_TIME, class_state, directive, engine_state, report, without

NOT_A_NUMBER = st.sampled_from([math.nan, math.inf, -math.inf])


def spoiled(place: str, value: object) -> EngineState:
    """A state with one wrong value."""
    if place.startswith("classes"):
        return engine_state(class_state("first"), class_state(**{place.split(".")[-1]: value}))  # type: ignore[arg-type]
    if place.startswith("step_time"):
        return engine_state(step_time=replace(STEP_TIME, **{place.split(".")[-1]: value}))  # type: ignore[arg-type]
    if place.startswith("profile"):
        field = place.split(".")[-1]
        wrong = (1.0, value, 1.0, 1.0) if field in ("tokens", "positions") else value
        return engine_state(profile=(PROFILE[0], replace(PROFILE[1], **{field: wrong})))  # type: ignore[arg-type]
    return engine_state(**{place: value})


def heartbeat(state: EngineState) -> ReplicaReport:
    return ReplicaReport(replica="a", number=1, seconds=0.0, state=state)


NUMBERS = {
    "max_num_seqs": "max_num_seqs",
    "kv_tokens": "kv_tokens",
    "ttft_p95_s": "ttft_p95_s",
    "classes.running": "classes[1].running",
    "classes.tokens": "classes[1].tokens",
    "step_time.fixed_s": "step_time.fixed_s",
    "profile.audited": "profile[1].audited",
}
SHARES = {
    "kv_cache_usage": "kv_cache_usage",
    "classes.threshold": "classes[1].threshold",
    "profile.agreement": "profile[1].agreement",
}


@given(st.sampled_from(sorted(NUMBERS | SHARES)), NOT_A_NUMBER | st.floats(max_value=-1e-9))
def test_no_number_of_a_report_is_negative_or_not_finite(place: str, value: float) -> None:
    with pytest.raises(ReportError) as error:
        heartbeat(spoiled(place, value))
    where = (NUMBERS | SHARES)[place]
    allowed = "from 0 to 1" if place in SHARES else "a finite number, at least 0"
    assert str(error.value) == f"report.state.{where} is {value}; it must be {allowed}."


@given(st.sampled_from(sorted(SHARES)), st.floats(1, 1e9, exclude_min=True))
def test_no_share_of_a_report_is_above_one(place: str, value: float) -> None:
    with pytest.raises(ReportError) as error:
        heartbeat(spoiled(place, value))
    assert str(error.value) == f"report.state.{SHARES[place]} is {value}; it must be from 0 to 1."


@given(st.sampled_from(sorted(NUMBERS)), st.floats(1, 1e9))
def test_numbers_that_are_no_shares_may_be_above_one(place: str, value: float) -> None:
    assert heartbeat(spoiled(place, value)).state == spoiled(place, value)


@pytest.mark.parametrize("obstacle", [None, "the engine starts again"])
def test_a_report_may_say_why_its_engine_does_not_work(obstacle: str | None) -> None:
    state = engine_state(obstacle=obstacle, restarts=(RestartCount("stalled", 2),))
    assert pickle.loads(pickle.dumps(heartbeat(state))).state == state


@pytest.mark.parametrize("obstacle", ["", 3])
def test_the_reason_why_an_engine_does_not_work_is_a_text(obstacle: object) -> None:
    with pytest.raises(ReportError, match=r"report\.state\.obstacle is .*; it must be a name"):
        heartbeat(engine_state(obstacle=obstacle))


@pytest.mark.parametrize("field", ["kv_cache_usage", "classes", "profile", "tpot_p95_s"])
def test_a_report_of_a_version_without_a_field_is_refused_by_the_name_of_the_field(field: str) -> None:
    with pytest.raises(ReportError, match=f"^report.state.{field} is missing.$"):
        heartbeat(without(engine_state(), field))


def test_a_missing_field_is_found_however_deep_it_is() -> None:
    broken = class_state("second")
    object.__delattr__(broken, "arrived")
    with pytest.raises(ReportError, match=r"^report.state.classes\[1\].arrived is missing.$"):
        heartbeat(engine_state(class_state(), broken))


def test_modelled_steps_are_told_by_the_name_of_their_machine_and_its_slow_steps_are_a_number() -> None:
    modelled = ModelledSteps(name="h200/qwen2.5-7b", slow_steps=3)
    assert heartbeat(engine_state(modelled=modelled)).state.modelled == modelled
    with pytest.raises(ReportError, match=r"^report.state.modelled.name is ''; it must be a name.$"):
        heartbeat(engine_state(modelled=replace(modelled, name="")))
    with pytest.raises(ReportError, match=r"^report.state.modelled.slow_steps is -1"):
        heartbeat(engine_state(modelled=replace(modelled, slow_steps=-1)))


def test_a_report_without_a_class_of_service_is_refused() -> None:
    with pytest.raises(ReportError, match="it must have at least one class"):
        heartbeat(replace(engine_state(), classes=()))


@pytest.mark.parametrize("value", [True, [1.0], {"share": 1.0}, b"1"])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ReportError, match=r"kv_cache_usage is .*; it must be from 0 to 1"):
        heartbeat(engine_state(kv_cache_usage=value))


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_the_clock_of_a_report_is_checked_too(seconds: float) -> None:
    with pytest.raises(ReportError, match=r"^report.seconds is"):
        report(1, seconds)


@pytest.mark.parametrize("value", [1.7, -0.1, math.nan, math.inf])
def test_no_directive_holds_a_threshold_out_of_range(value: float) -> None:
    with pytest.raises(ReportError, match=f"^the threshold of class slow is {value}; it must be from 0 to 1.$"):
        directive(thresholds={"standard": 0.9, "slow": value})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_every_directive_ends(value: float) -> None:
    with pytest.raises(ReportError, match=f"^lease_s is {value}; it must be above 0.$"):
        directive(lease_s=value)


def test_no_directive_wants_less_than_no_replica() -> None:
    with pytest.raises(ReportError, match=r"^desired_replicas is -1; it must be at least 0.$"):
        directive(desired_replicas=-1)
    assert directive(desired_replicas=0).desired_replicas == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": "4"},
        {"max_num_seqs": 0},
        {"kv_tokens": None},
        {"profile": (PROFILE[0], replace(PROFILE[1], tokens=(1.5,)))},
        {"step_time": replace(STEP_TIME, fixed_s=0.0, seq_s=0.0, position_s=0.0)},
    ],
)
def test_a_report_on_which_no_decision_can_be_made_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ReportError):
        report(1, 0.0, **fields)  # type: ignore[arg-type]


def test_a_report_that_came_from_elsewhere_is_checked_again() -> None:
    tampered = report(1, 0.0)
    object.__setattr__(tampered, "seconds", float("nan"))
    with pytest.raises(ReportError, match=r"report\.seconds is nan"):
        pickle.loads(pickle.dumps(tampered))
    assert pickle.loads(pickle.dumps(report(1, 0.0))) == report(1, 0.0)
