"""The policies: pure, within bounds, never higher for more load; who asks for most pays first."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan, ControlSettings, PolicyName, SloSettings
from mars_ray.control.demand import ClassDemand
from mars_ray.control.policies.capacity import (
    CAPACITY,
    GAIN_PER_S,
    IN_TIME_PER_CAPACITY,
    LatencyState,
    aimed_tpot_s,
    worthwhile,
)
from mars_ray.control.policies.policy import Bounds, bounds_of
from mars_ray.control.policies.policy_registry import POLICIES
from mars_ray.engine.service_class import ServiceClass
from tests.control.control_samples import PROFILE, SPEED, load_of, plan_of, requests_at, wanted

NAMES: list[PolicyName] = ["fixed", "capacity"]
PROMISED = SloSettings(ttft_ms=500, tpot_ms=60)
FULL = requests_at(1.0)
"""Requests a second that take one replica's whole time at the ceiling."""

PLANS = st.builds(
    lambda classes, slo, headroom: plan_of(
        *(ServiceClass(name=f"c{n}", floor=f, priority=p, share=s) for n, (f, p, s) in enumerate(classes)),
        slo=slo,
        headroom=headroom,
    ),
    st.lists(
        st.tuples(st.sampled_from([0.4, 0.5, 0.85, 0.95]), st.integers(0, 1), st.sampled_from([0.3, 1.0, 2.0])),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([SloSettings(), PROMISED, SloSettings(tpot_ms=8)]),
    st.sampled_from([0.0, 0.2]),
)
LATENCY = st.none() | st.floats(0, 10)


@st.composite
def situations(draw: st.DrawFn) -> tuple[ControlPlan, ClusterLoad]:
    plan = draw(PLANS)
    classes = [
        wanted(
            each.name,
            draw(st.floats(0, 3 * FULL)),
            output_tokens=draw(st.floats(1, 200)),
            running=draw(st.integers(0, 8)),
            waiting=draw(st.integers(0, 30)),
        )
        for each in plan.classes
    ]
    speed = draw(st.sampled_from([SPEED, SPEED, None]))
    replicas = draw(st.integers(1, 3))
    return plan, load_of(*classes, replicas=replicas, speed=speed, ttft_p95_s=draw(LATENCY), tpot_p95_s=draw(LATENCY))


def state_of(name: PolicyName, integral: float) -> LatencyState | None:
    return LatencyState(integral) if name == "capacity" else None


def decided(
    plan: ControlPlan,
    load: ClusterLoad,
    name: PolicyName,
    bounds: dict[str, Bounds] | None = None,
    integral: float = 0.0,
) -> dict[str, float]:
    decisions, _ = POLICIES[name].decide(plan, load, bounds or bounds_of(plan, []), state_of(name, integral), 1.0)
    return {each: decision.threshold for each, decision in decisions.items()}


def changed(load: ClusterLoad, name: str, **fields: Any) -> ClusterLoad:
    return replace(load, classes=tuple(replace(c, **fields) if c.name == name else c for c in load.classes))


def capacity(plan: ControlPlan, *classes: object, **fields: Any) -> dict[str, float]:
    return decided(plan, load_of(*classes, **fields), "capacity")  # type: ignore[arg-type]


@given(situations(), st.sampled_from(NAMES), st.floats(0, 1))
def test_the_same_load_gives_the_same_decisions_and_nothing_handed_in_changes(
    situation: tuple[ControlPlan, ClusterLoad], name: PolicyName, integral: float
) -> None:
    plan, load = situation
    state, bounds = state_of(name, integral), bounds_of(plan, [])
    before = dict(bounds)
    first = POLICIES[name].decide(plan, load, bounds, state, 1.0)
    assert POLICIES[name].decide(plan, load, bounds, state, 1.0) == first
    assert state == state_of(name, integral) and bounds == before


@given(situations(), st.sampled_from(NAMES), st.floats(0, 1))
def test_every_decision_is_one_of_the_choices_of_its_class_and_has_a_reason(
    situation: tuple[ControlPlan, ClusterLoad], name: PolicyName, integral: float
) -> None:
    plan, load = situation
    bounds = bounds_of(plan, [])
    decisions, _ = POLICIES[name].decide(plan, load, bounds, state_of(name, integral), 1.0)
    assert set(decisions) == set(bounds)
    for each, decision in decisions.items():
        assert decision.threshold in bounds[each].choices and decision.reason


@given(situations())
def test_fixed_leaves_every_threshold_at_its_ceiling(situation: tuple[ControlPlan, ClusterLoad]) -> None:
    assert set(decided(*situation, "fixed").values()) == {0.95}


MORE = st.tuples(st.floats(0, FULL), st.integers(0, 4), st.integers(0, 20))


@given(situations(), st.sampled_from(NAMES), MORE)
@settings(max_examples=400)
def test_who_asks_for_more_never_gets_a_higher_threshold(
    situation: tuple[ControlPlan, ClusterLoad], name: PolicyName, more: tuple[float, int, int]
) -> None:
    plan, load = situation
    plan = plan.model_copy(update={"settings": plan.settings.model_copy(update={"slo": SloSettings(ttft_ms=500)})})
    first = load.classes[0]
    heavier = changed(
        load,
        first.name,
        requests_s=first.requests_s + more[0],
        running=first.running + more[1],
        waiting=first.waiting + more[2],
    )
    assert decided(plan, heavier, name)[first.name] <= decided(plan, load, name)[first.name]


@given(situations(), st.sampled_from(NAMES), st.floats(0, 2 * FULL))
def test_with_one_class_more_requests_never_raise_its_threshold_whatever_was_promised(
    situation: tuple[ControlPlan, ClusterLoad], name: PolicyName, more: float
) -> None:
    plan, load = situation
    plan = plan.model_copy(update={"classes": plan.classes[:1]})
    (only,) = load.classes[:1]
    load = replace(load, classes=(only,))
    heavier = changed(load, only.name, requests_s=only.requests_s + more)
    assert decided(plan, heavier, name)[only.name] <= decided(plan, load, name)[only.name]


@given(situations(), st.floats(0, 5), st.floats(0, 1), st.floats(0, 1))
def test_without_a_measured_speed_slower_answers_never_raise_a_threshold(
    situation: tuple[ControlPlan, ClusterLoad], more_s: float, one: float, other: float
) -> None:
    plan, load = situation
    load = replace(load, speed=None)
    slower = replace(
        load,
        ttft_p95_s=None if load.ttft_p95_s is None else load.ttft_p95_s + more_s,
        tpot_p95_s=None if load.tpot_p95_s is None else load.tpot_p95_s + more_s,
    )
    low, high = sorted((one, other))
    now, then = decided(plan, load, "capacity", integral=low), decided(plan, slower, "capacity", integral=high)
    assert all(then[name] <= now[name] for name in now)


@given(situations(), st.floats(0, 1))
def test_more_headroom_never_raises_a_threshold_of_one_class(
    situation: tuple[ControlPlan, ClusterLoad], headroom: float
) -> None:
    plan, load = situation
    assume(headroom < 1)
    plan, load = plan.model_copy(update={"classes": plan.classes[:1]}), replace(load, classes=load.classes[:1])
    wider = plan.model_copy(update={"settings": plan.settings.model_copy(update={"headroom": 0.0})})
    closer = plan.model_copy(update={"settings": plan.settings.model_copy(update={"headroom": headroom})})
    assert decided(closer, load, "capacity")["c0"] <= decided(wider, load, "capacity")["c0"]


# Latency alone, before a speed is known


def by_latency(plan: ControlPlan, *classes: ClassDemand, **latency: float) -> dict[str, float]:
    return capacity(plan, *classes, speed=None, **latency)


def test_nothing_falls_while_the_promise_is_kept_or_nothing_is_measured() -> None:
    kept: list[dict[str, Any]] = [{}, {"ttft_p95_s": 0.4}, {"ttft_p95_s": 0.1, "tpot_p95_s": 0.05}]
    for latency in kept:
        assert by_latency(plan_of(slo=PROMISED), wanted(running=4), **latency) == {"standard": 0.95}
    assert by_latency(plan_of(), wanted(running=4), ttft_p95_s=99.0) == {"standard": 0.95}


def test_thresholds_go_on_falling_while_the_promise_is_broken() -> None:
    plan, state, found = plan_of(slo=PROMISED), CAPACITY.initial, []
    for _ in range(60):
        load = load_of(wanted(running=4), speed=None, ttft_p95_s=0.7)
        decisions, state = CAPACITY.decide(plan, load, bounds_of(plan, []), state, 1.0)
        found.append(decisions["standard"].threshold)
    assert found[-1] == 0.5 and all(after <= before for before, after in pairwise(found))


def test_a_threshold_is_back_at_the_ceiling_soon_after_an_hour_of_broken_promises() -> None:
    plan, state = plan_of(slo=PROMISED), CAPACITY.initial
    bounds = bounds_of(plan, [])
    for _ in range(3600):
        load = load_of(wanted(running=4), speed=None, ttft_p95_s=30.0)
        decisions, state = CAPACITY.decide(plan, load, bounds, state, 1.0)
    assert decisions["standard"].threshold == 0.5
    calls = 0
    while decisions["standard"].threshold < 0.95:
        load = load_of(wanted(running=1), speed=None, ttft_p95_s=0.05)
        decisions, state = CAPACITY.decide(plan, load, bounds, state, 1.0)
        calls += 1
    assert calls <= 1 / GAIN_PER_S


def test_the_worse_of_two_broken_promises_counts() -> None:
    plan = plan_of(slo=PROMISED)
    ttft = by_latency(plan, wanted(running=4), ttft_p95_s=2.0, tpot_p95_s=0.001)
    itl = by_latency(plan, wanted(running=4), ttft_p95_s=0.001, tpot_p95_s=0.24)
    assert ttft == itl and ttft["standard"] < 0.95


def test_only_classes_that_use_more_than_their_share_pay_for_a_broken_promise() -> None:
    plan = plan_of(ServiceClass(name="many", floor=0.5), ServiceClass(name="few", floor=0.5), slo=PROMISED)
    found = by_latency(plan, wanted("many", waiting=40), wanted("few", running=1), ttft_p95_s=30.0)
    assert found == {"many": 0.5, "few": 0.95}


def test_a_broken_promise_lowers_no_class_for_a_flood_of_lower_priority() -> None:
    plan = plan_of(
        ServiceClass(name="urgent", floor=0.5, priority=1), ServiceClass(name="flood", floor=0.5), slo=PROMISED
    )
    found = by_latency(plan, wanted("urgent", running=2), wanted("flood", running=2, waiting=50), ttft_p95_s=30.0)
    assert found == {"urgent": 0.95, "flood": 0.5}


# The policy `capacity`


@given(st.floats(0, 4 * FULL), st.integers(0, 40), st.integers(1, 3), st.sampled_from([None, 5.0, 9.0, 40.0]))
def test_capacity_with_one_class_takes_the_highest_choice_that_fits(
    requests_s: float, waiting: int, replicas: int, tpot_ms: float | None
) -> None:
    plan = plan_of(slo=SloSettings(tpot_ms=tpot_ms))
    load = load_of(wanted(requests_s=requests_s, waiting=waiting), replicas=replicas)
    choices = bounds_of(plan, [])["standard"].choices
    fitting = [
        threshold
        for threshold in choices
        if load.share_with_queue("standard", threshold, aimed_tpot_s(plan)) <= (1 - plan.settings.headroom) * replicas
    ]
    assert decided(plan, load, "capacity") == {"standard": max(fitting, default=0.5)}


def test_capacity_lowers_nothing_before_a_speed_is_known() -> None:
    assert capacity(plan_of(), wanted(waiting=1000), speed=None) == {"standard": 0.95}


def test_capacity_under_overload_is_at_the_floor() -> None:
    assert capacity(plan_of(), wanted(requests_s=20 * FULL)) == {"standard": 0.5}


@given(st.floats(0, 0.39), st.floats(0, 50), st.integers(0, 1000))
def test_a_class_within_its_share_keeps_its_ceiling_whatever_the_flood_of_another(
    modest: float, flood: float, waiting: int
) -> None:
    plan = plan_of(ServiceClass(name="modest", floor=0.4), ServiceClass(name="flood", floor=0.5))
    found = capacity(plan, wanted("modest", requests_at(modest)), wanted("flood", requests_at(flood), waiting=waiting))
    assert found["modest"] == 0.95


@given(
    st.floats(0, 2), st.floats(0, 50), st.integers(0, 1000), st.sampled_from([SloSettings(), SloSettings(tpot_ms=15)])
)
def test_a_flood_of_lower_priority_never_lowers_a_class_of_higher_priority(
    urgent: float, flood: float, waiting: int, slo: SloSettings
) -> None:
    plan = plan_of(ServiceClass(name="urgent", floor=0.5, priority=1), ServiceClass(name="flood", floor=0.5), slo=slo)
    demand = wanted("urgent", requests_at(urgent))
    alone = capacity(plan, demand, wanted("flood"))
    flooded = capacity(plan, demand, wanted("flood", requests_at(flood), waiting=waiting))
    assert flooded["urgent"] == alone["urgent"]


def test_a_class_pays_for_what_those_of_higher_priority_leave() -> None:
    plan = plan_of(ServiceClass(name="urgent", floor=0.5, priority=1), ServiceClass(name="late", floor=0.5))
    found = capacity(plan, wanted("urgent", requests_at(0.75)), wanted("late", requests_at(0.5)))
    assert found["urgent"] == 0.95 and found["late"] < 0.95


ALIKE = st.tuples(st.floats(0.3, 0.9), st.floats(1.0, 1.2)).map(lambda pair: [pair[0], pair[0] * pair[1]])
"""What two classes ask for that stand about even: who is the heavier must not make the other pay."""


@given(ALIKE)
@settings(max_examples=300)
def test_of_classes_that_stand_about_even_the_one_that_asks_for_more_does_not_gain(asked: list[float]) -> None:
    plan = plan_of(ServiceClass(name="a", floor=0.4), ServiceClass(name="b", floor=0.4))
    light, heavy = (wanted("a", requests_at(share)) for share in asked)
    other = wanted("b", requests_at(asked[1] * 0.999))
    assert capacity(plan, heavy, other)["a"] <= capacity(plan, light, other)["a"]


@given(st.lists(st.floats(0, 2), min_size=2, max_size=3) | ALIKE, st.sampled_from([0.0, 0.2]))
@settings(max_examples=300)
def test_of_equal_classes_the_one_that_asks_for_more_never_has_the_higher_threshold(
    asked: list[float], headroom: float
) -> None:
    plan = plan_of(*(ServiceClass(name=f"c{n}", floor=0.4) for n in range(len(asked))), headroom=headroom)
    found = capacity(plan, *(wanted(f"c{n}", requests_at(share)) for n, share in enumerate(asked)))
    for (one, first), (other, second) in pairwise(sorted((share, found[f"c{n}"]) for n, share in enumerate(asked))):
        assert first >= second or one == other


@given(situations())
def test_capacity_fits_what_is_asked_wherever_the_floors_allow_it(situation: tuple[ControlPlan, ClusterLoad]) -> None:
    plan, load = situation
    assume(load.speed is not None)
    room, floors = load.replicas * (1 - plan.settings.headroom), {n: b.floor for n, b in bounds_of(plan, []).items()}
    found = decided(plan, load, "capacity")
    for priority in {each.priority for each in plan.classes}:
        served = [each.name for each in plan.classes if each.priority >= priority]
        taken = sum(
            load.share_with_queue(each.name, found[each.name]) for each in plan.classes if each.priority > priority
        )
        peers = [each.name for each in plan.classes if each.priority == priority]
        if taken + sum(load.share_with_queue(name, floors[name]) for name in peers) <= room:
            # A class within its share may keep its ceiling, but then the others can go low enough.
            total = sum(load.share_with_queue(name, found[name]) for name in served)
            pays = [name for name in peers if found[name] > floors[name]]
            assert total <= room * (1 + 1e-9) or all(
                load.share_with_queue(name, found[name]) <= room * plan_share(plan, name) * (1 + 1e-9) for name in pays
            )


def plan_share(plan: ControlPlan, name: str) -> float:
    own = next(each for each in plan.classes if each.name == name)
    return own.share / sum(each.share for each in plan.classes if each.priority == own.priority)


@given(st.floats(0, 1))
def test_shares_count_against_each_other_not_by_their_size(part: float) -> None:
    demands = wanted("a", part * FULL, running=2, waiting=1), wanted("b", (1 - part) * FULL, running=2)
    small, large = (
        decided(
            plan_of(ServiceClass(name="a", floor=0.4, share=s), ServiceClass(name="b", floor=0.4, share=2 * s)),
            load_of(*demands, ttft_p95_s=1.0),
            "capacity",
        )
        for s in (0.5, 4.0)
    )
    assert small == large


def test_capacity_does_not_go_on_where_a_step_costs_more_than_it_buys() -> None:
    choices = (1.0, 0.95, 0.9, 0.8)
    now = load_of(wanted("standard", FULL))
    gain = now.request_seconds("standard", 0.95) / now.request_seconds("standard", 0.9) - 1
    free = ControlPlan(accuracy=tuple((each, 0.99) for each in choices))
    assert worthwhile(free, now, "standard", choices) == choices
    even = IN_TIME_PER_CAPACITY * gain / ControlSettings().in_time_per_accuracy
    dear = ControlPlan(accuracy=((1.0, 0.99), (0.95, 0.99), (0.9, 0.99 - 1.1 * even), (0.8, 0.0)))
    assert worthwhile(dear, now, "standard", choices) == (1.0, 0.95)
    cheap = ControlPlan(accuracy=((1.0, 0.99), (0.95, 0.99), (0.9, 0.99 - 0.9 * even), (0.8, 0.0)))
    assert worthwhile(cheap, now, "standard", choices) == (1.0, 0.95, 0.9)


def test_a_step_that_is_no_faster_is_left_out_and_a_faster_one_behind_it_is_not() -> None:
    slow = replace(PROFILE[1], tokens=PROFILE[0].tokens, positions=PROFILE[0].positions)
    speed = replace(SPEED, profile=(PROFILE[0], slow, *PROFILE[2:]))
    now = replace(load_of(wanted("standard", FULL)), speed=speed)
    assert worthwhile(ControlPlan(), now, "standard", (1.0, 0.99, 0.95)) == (1.0, 0.95)


def test_a_step_buys_less_where_reading_prompts_takes_most_of_the_time() -> None:
    plan = ControlPlan(accuracy=((1.0, 0.99), (0.95, 0.985)))
    short, long = (load_of(replace(wanted("standard", FULL), prompt_tokens=tokens)) for tokens in (10.0, 1_000_000.0))
    assert worthwhile(plan, short, "standard", (1.0, 0.95)) == (1.0, 0.95)
    assert worthwhile(plan, long, "standard", (1.0, 0.95)) == (1.0,)


def test_under_any_overload_capacity_stops_at_the_last_step_that_is_worth_it() -> None:
    plan = plan_of(ServiceClass(floor=0.5)).model_copy(update={"accuracy": ((1.0, 0.99), (0.8, 0.99), (0.7, 0.2))})
    assert plan.settings.max_accuracy_loss < 0.79
    free = plan.model_copy(update={"settings": plan.settings.model_copy(update={"max_accuracy_loss": 1.0})})
    assert capacity(free, wanted(requests_s=1000.0, waiting=500)) == {"standard": 0.8}


CALIBRATED = ((1.0, 0.99), (0.9, 0.985), (0.8, 0.97), (0.5, 0.9))


def calibrated(**settings: Any) -> ControlPlan:
    plan = plan_of(max_accuracy_loss=1.0, **settings)
    return plan.model_copy(update={"accuracy": CALIBRATED})


@given(st.floats(0, 3 * FULL), st.floats(0, 20), st.floats(0, 20), LATENCY)
def test_a_higher_exchange_rate_never_lowers_a_threshold(
    requests_s: float, one: float, other: float, ttft_p95_s: float | None
) -> None:
    low, high = sorted((one, other))
    load = load_of(wanted(requests_s=requests_s), ttft_p95_s=ttft_p95_s)
    cheap, dear = (
        decided(calibrated(slo=PROMISED, in_time_per_accuracy=rate), load, "capacity")["standard"]
        for rate in (low, high)
    )
    assert dear >= cheap


def test_a_promise_that_is_met_by_far_takes_no_step_early_and_one_that_is_near_takes_cheap_ones() -> None:
    plan = calibrated(slo=PROMISED)
    demand = wanted(requests_s=requests_at(0.9))
    latencies: list[dict[str, Any]] = [{}, {"ttft_p95_s": 0.01}, {"ttft_p95_s": 0.01, "tpot_p95_s": 0.001}]
    for far in latencies:
        assert decided(plan, load_of(demand, **far), "capacity") == {"standard": 0.95}
    assert decided(plan, load_of(demand, ttft_p95_s=0.39), "capacity")["standard"] < 0.95


@given(st.floats(0, 3 * FULL), st.floats(0, 1), st.floats(0, 1))
def test_slower_answers_never_raise_a_threshold_of_capacity(requests_s: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    now, then = (
        decided(calibrated(slo=PROMISED), load_of(wanted(requests_s=requests_s), ttft_p95_s=each), "capacity")
        for each in (low, high)
    )
    assert then["standard"] <= now["standard"]


def test_an_exchange_rate_of_which_no_step_is_worth_anything_leaves_the_ceiling() -> None:
    plan = calibrated(slo=PROMISED, in_time_per_accuracy=1e6)
    load = load_of(wanted(requests_s=20 * FULL, waiting=50), ttft_p95_s=60.0)
    assert decided(plan, load, "capacity") == {"standard": 0.95}
