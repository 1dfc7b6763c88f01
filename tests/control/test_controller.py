"""The controller as a whole: replicas that wait, run and end in front of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from pydantic import TypeAdapter

from mars_ray.control.cluster_load import Backlog
from mars_ray.control.control_settings import ControlPlan, PolicyName, SloSettings
from mars_ray.control.core.batch_job import BACKLOG_S
from mars_ray.control.core.controller import Controller
from mars_ray.control.core.overrides import Override
from mars_ray.control.core.policy_changes import PolicyChange
from mars_ray.control.policies.policy_registry import POLICIES
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import ConfigError, ReportError
from tests.control.control_samples import SPEED, Plant, class_state, plan_of, profile, report, requests_at
from tests.factories.clock import Clock

SPEED_8 = replace(SPEED, rows=8)
SLO = SloSettings(ttft_ms=800, tpot_ms=40)


class Store:
    """Keeps the bytes that a real one would write."""

    def __init__(self) -> None:
        self.saved: bytes | None = None

    def load(self) -> bytes | None:
        return self.saved

    def save(self, overrides: bytes) -> None:
        self.saved = overrides


class Cluster:
    """Replicas and a controller, second by second."""

    def __init__(self, plan: ControlPlan, replicas: int = 1, seed: int = 0, store: Store | None = None) -> None:
        self.clock, self.plan, self.store = Clock(), plan, store or Store()
        names = [each.name for each in plan.classes]
        self.plants = [Plant(f"r{n}", 100 * seed + n, names, SPEED_8) for n in range(replicas)]
        self.restart()

    def restart(self) -> None:
        self.changes: list[PolicyChange] = []
        self.controller = Controller(
            self.plan,
            store=self.store,
            clock=self.clock,
            unix_clock=self.clock,
            observe_change=self.changes.append,
        )

    def run(self, seconds: int, shares: Sequence[float], name: str | None = None) -> list[list[float]]:
        """Ask each replica for a share of its time at the ceiling; return the thresholds of each second."""
        name, found = name or self.plan.classes[0].name, []
        for _ in range(seconds):
            self.clock.now_s += 1
            for plant, share in zip(self.plants, shares, strict=True):
                plant.run(1.0, {name: requests_at(share, 0.95, SPEED_8)})
                plant.take(self.controller.handle_report(plant.report()))
            found.append([plant.thresholds[name] for plant in self.plants])
        return found

    def threshold(self) -> float:
        return self.controller.status().classes[0].threshold


def test_idle_replicas_stay_at_the_ceiling() -> None:
    cluster = Cluster(plan_of(), replicas=2)
    assert cluster.run(30, [0.0, 0.0]) == [[0.95, 0.95]] * 30


def test_thresholds_fall_under_overload_and_are_back_within_a_minute_after_it() -> None:
    cluster = Cluster(plan_of(slo=SLO))
    assert cluster.run(120, [2.5])[-1] == [0.5]
    while cluster.plants[0].state().waiting:  # load is gone when its queue is
        cluster.run(1, [0.02])
    found = cluster.run(60, [0.02])
    assert found[0] == [0.5] and found[-1] == [0.95]


def changes_a_minute(share: float, slo: SloSettings = SLO, replicas: int = 1) -> float:
    """Of a threshold, under steady load of Poisson arrivals, over several seeds."""
    changes = 0
    for seed in range(2):
        cluster = Cluster(plan_of(slo=slo), seed=seed, replicas=replicas)
        cluster.run(60, [share] * replicas)
        before = cluster.controller.status().classes[0].changes
        cluster.run(240, [share] * replicas)
        changes += cluster.controller.status().classes[0].changes - before
    return changes / 8


@pytest.mark.parametrize("share", [0.3, 2.5])
def test_under_steady_load_far_from_capacity_a_threshold_changes_less_than_twice_a_minute(share: float) -> None:
    assert changes_a_minute(share) < 2


@pytest.mark.parametrize(("share", "replicas", "most"), [(0.3, 4, 0.5), (0.8, 4, 2.5), (0.8, 1, 4)])
def test_near_capacity_too_a_threshold_follows_demand_a_few_times_a_minute_at_most(
    share: float, replicas: int, most: float
) -> None:
    assert changes_a_minute(share, SloSettings(), replicas) < most


def test_a_hot_replica_gets_a_lower_threshold_than_the_others_and_comes_back() -> None:
    cluster = Cluster(plan_of(), replicas=3)
    hot = cluster.run(60, [1.6, 0.1, 0.1])[-1]
    assert hot[0] < 0.95 and hot[1:] == [0.95, 0.95]
    assert cluster.run(60, [0.1, 0.1, 0.1])[-1] == [0.95] * 3


def test_no_replica_is_hot_when_nothing_follows_load() -> None:
    cluster = Cluster(plan_of(policy="fixed"), replicas=2)
    assert cluster.run(60, [2.0, 0.1])[-1] == [0.95, 0.95]


@pytest.mark.parametrize("policy", ["capacity", "fixed"])
def test_the_replicas_that_are_wanted_do_not_depend_on_the_thresholds_in_force(policy: PolicyName) -> None:
    wanted_replicas = []
    for threshold in (0.95, 0.5):
        clock = Clock()
        controller = Controller(plan_of(policy=policy, slo=SLO), clock=clock, unix_clock=clock)
        for second in range(40):
            arrived = round(3 * requests_at(1.0) * second)
            state = class_state(
                threshold=threshold,
                running=4,
                arrived=arrived,
                prompt_tokens=20 * arrived,
                ended=arrived,
                tokens=64 * arrived,
            )
            directive = controller.handle_report(report(second + 1, clock.now_s, state))
            clock.now_s += 1
        wanted_replicas.append(directive.desired_replicas)
    # Three times what one does, and a fifth of each kept free.
    assert wanted_replicas[0] == wanted_replicas[1] == 4


def test_a_new_controller_begins_with_what_is_in_force() -> None:
    cluster = Cluster(plan_of(slo=SLO), replicas=2)
    before = cluster.run(120, [2.5, 2.5])[-1]
    assert before == [0.5, 0.5]
    cluster.restart()
    assert cluster.run(15, [2.5, 2.5]) == [before] * 15


def test_a_controller_decides_once_a_second_however_many_reports_come() -> None:
    clock = Clock()
    controller = Controller(plan_of(), clock=clock, unix_clock=clock)
    epochs = set()
    for number in range(1, 31):
        controller.handle_report(report(number, number / 10, replica=f"r{number % 3}"))
        epochs.add(controller.status().epoch)
        clock.now_s += 0.1
    assert len(epochs) in (3, 4)


def test_a_silent_replica_is_forgotten_and_its_load_with_it() -> None:
    clock = Clock()
    controller = Controller(plan_of(lease_s=5.0), clock=clock, unix_clock=clock)
    controller.handle_report(report(1, 0.0, class_state(waiting=500), replica="gone"))
    for number in range(1, 8):
        clock.now_s += 1
        controller.handle_report(report(number, float(number), replica="here"))
    assert [each.replica for each in controller.status().replicas] == ["here"]


def test_a_report_with_other_classes_is_refused_and_changes_nothing() -> None:
    controller = Controller(plan_of(), clock=Clock())
    with pytest.raises(ReportError, match=r"the report has the classes \['other'\]; it must have \['standard'\]"):
        controller.handle_report(report(1, 0.0, class_state("other")))
    assert controller.status().replicas == ()


def test_an_answer_is_for_the_report_it_came_with() -> None:
    controller = Controller(plan_of(lease_s=7.0), clock=Clock())
    found = controller.handle_report(report(41, 3.0, replica="b"))
    assert (found.replica, found.answers, found.lease_s, set(found.thresholds)) == ("b", 41, 7.0, {"standard"})


def test_the_reason_of_a_raised_floor_is_told() -> None:
    cluster = Cluster(plan_of())
    cluster.run(30, [3.0])
    audited = profile(audited={0.8: (0.5, 5000.0)})
    state = replace(cluster.plants[0].state(), profile=audited)
    for number in range(2000, 2003):
        cluster.clock.now_s += 1
        found = cluster.controller.handle_report(replace(report(number, 500.0 + number, replica="r0"), state=state))
    assert found.thresholds == {"standard": 0.85}
    status = cluster.controller.status().classes[0]
    assert (status.floor, status.floor_asked, status.ceiling) == (0.85, 0.5, 0.95)
    assert status.floor_reason == "the live audit found 0.500 agreement at 0.8"


# Overrides

TWO = plan_of(ServiceClass(name="gold", floor=0.8), ServiceClass(name="batch", floor=0.5))


def thresholds(cluster: Cluster) -> dict[str, float]:
    cluster.run(1, [0.0])
    return cluster.plants[0].thresholds


def test_an_override_holds_at_once_for_its_class_until_it_is_cleared() -> None:
    cluster = Cluster(TWO)
    cluster.run(5, [0.0])
    cluster.controller.set_threshold(0.6, "batch", None)
    assert thresholds(cluster) == {"gold": 0.95, "batch": 0.6}
    cluster.run(600, [0.0])
    assert thresholds(cluster) == {"gold": 0.95, "batch": 0.6}
    cluster.controller.clear_threshold("batch")
    assert thresholds(cluster) == {"gold": 0.95, "batch": 0.95}


def test_an_override_without_a_class_is_for_all_and_so_is_clearing() -> None:
    cluster = Cluster(TWO)
    cluster.controller.set_threshold(0.85, None, None)
    assert thresholds(cluster) == {"gold": 0.85, "batch": 0.85}
    cluster.controller.clear_threshold(None)
    assert [each.override for each in cluster.controller.status().classes] == [None, None]


def test_changes_by_the_policy_are_observed_with_the_load_and_those_of_operators_are_not() -> None:
    cluster = Cluster(plan_of())
    cluster.controller.set_threshold(0.8, None, 30.0)
    cluster.run(20, [0.0])
    assert cluster.changes == []
    cluster.run(120, [2.5])
    first, *others = cluster.changes
    assert first.before == 0.8
    lowest = min(cluster.changes, key=lambda change: change.lowest)
    assert lowest.lowest == 0.5 and lowest.load is not None and lowest.load > 1
    assert "of the capacity at full quality" in lowest.cause
    assert len(others) <= 2, "no more than one a minute"


def test_an_override_ends_by_itself() -> None:
    cluster = Cluster(TWO)
    cluster.controller.set_threshold(0.8, "gold", 30.0)
    found = [thresholds(cluster)["gold"] for _ in range(35)]
    assert found == [0.8] * 29 + [0.95] * 6


def test_what_load_asks_for_holds_when_an_override_ends() -> None:
    cluster = Cluster(plan_of())
    cluster.controller.set_threshold(0.95, None, 90.0)
    assert cluster.run(89, [2.5])[-1] == [0.95]
    assert cluster.run(5, [2.5])[-1] == [0.5]


def test_overrides_survive_a_restart_and_their_end_too() -> None:
    cluster = Cluster(TWO)
    cluster.controller.set_threshold(0.8, "gold", 30.0)
    cluster.controller.set_threshold(0.6, "batch", None)
    cluster.run(10, [0.0])
    cluster.restart()
    assert thresholds(cluster) == {"gold": 0.8, "batch": 0.6}
    cluster.run(30, [0.0])
    cluster.restart()
    assert thresholds(cluster)["batch"] == 0.6 and cluster.controller.status().classes[0].override is None


def test_a_stored_override_that_is_out_of_the_bounds_of_today_is_dropped() -> None:
    store = Store()
    saved = {"gold": Override(0.6, None), "batch": Override(0.6, None), "former": Override(0.9, None)}
    store.save(TypeAdapter(dict[str, Override]).dump_json(saved))
    assert thresholds(Cluster(TWO, store=store)) == {"gold": 0.95, "batch": 0.6}


@pytest.mark.parametrize(
    ("threshold", "name", "seconds", "message"),
    [
        (0.7, "gold", None, "threshold is 0.7; class gold allows 0.8 to 0.95."),
        (0.7, None, None, "threshold is 0.7; class gold allows 0.8 to 0.95."),
        (0.99, "batch", None, "threshold is 0.99; class batch allows 0.5 to 0.95."),
        (float("nan"), "batch", None, "threshold is nan; class batch allows"),
        (0.9, "gold", 0.0, "the override lasts 0 s, must be above 0 and at most 31,622,400, a year."),
        (0.9, "gold", 1e18, r"the override lasts 1e\+18 s"),
        (0.9, "gold", float("inf"), "the override lasts inf s"),
        (0.9, "silver", None, "there is no class 'silver'; there are gold, batch."),
    ],
)
def test_an_override_that_cannot_be_is_refused_and_nothing_changes(
    threshold: float, name: str | None, seconds: float | None, message: str
) -> None:
    cluster = Cluster(TWO)
    with pytest.raises(ConfigError, match=message):
        cluster.controller.set_threshold(threshold, name, seconds)
    assert thresholds(cluster) == {"gold": 0.95, "batch": 0.95}
    assert cluster.store.saved is None


def test_every_policy_has_its_name_in_the_settings() -> None:
    assert set(POLICIES) == set(get_args(PolicyName))


JOB = plan_of(ServiceClass(floor=0.5), policy="deadline")


def told(tokens: float, seconds: float | None, paused: bool = False, plan: ControlPlan = JOB) -> Cluster:
    cluster = Cluster(plan, replicas=2)
    cluster.controller.update_backlog(Backlog(tokens=tokens, seconds=seconds), paused=paused)
    return cluster


def test_workers_of_a_job_that_is_short_of_time_follow_its_backlog() -> None:
    cluster = told(2e6, 100.0)
    assert cluster.run(5, [0.9, 0.9])[-1] == [0.5, 0.5]
    cluster.controller.update_backlog(Backlog(tokens=10.0, seconds=100.0), paused=False)
    assert cluster.run(60, [0.9, 0.9])[-1] == [0.95, 0.95]


def test_the_time_left_goes_on_between_what_a_driver_tells() -> None:
    cluster = told(SPEED_8.max_tokens_s(0.95) * 2 * 14, 20.0)
    assert cluster.run(2, [0.9, 0.9])[-1] == [0.95, 0.95]
    assert cluster.run(12, [0.9, 0.9])[-1] == [0.5, 0.5]


def test_a_backlog_that_its_driver_does_not_renew_is_forgotten() -> None:
    cluster = told(2e6, 100.0)
    assert cluster.run(int(BACKLOG_S), [0.9, 0.9])[-1] == [0.5, 0.5]
    assert cluster.controller.job()
    assert cluster.run(60, [0.9, 0.9])[-1] == [0.95, 0.95]
    assert cluster.controller.job() is None


def test_how_late_a_job_ends_is_in_the_status_with_the_reason() -> None:
    cluster = told(2e6, 100.0)
    cluster.run(int(BACKLOG_S), [0.9, 0.9])
    (status,) = cluster.controller.status().classes
    assert status.late_s > 100 and "after its deadline" in status.reason
    cluster.controller.set_threshold(0.8, None, None)
    cluster.controller.update_backlog(Backlog(tokens=2e6, seconds=80.0), paused=False)
    cluster.run(2, [0.9, 0.9])
    assert cluster.controller.status().classes[0].late_s > 100


def test_a_job_without_a_deadline_keeps_its_threshold() -> None:
    fixed = plan_of(ServiceClass(floor=0.5), policy="fixed")
    assert told(2e6, None, plan=fixed).run(20, [2.0, 2.0]) == [[0.95, 0.95]] * 20


def test_workers_are_paused_when_their_driver_says_so_and_no_replica_is_else() -> None:
    cluster = told(10.0, 100.0, paused=True)
    report_of = cluster.plants[0].report
    assert cluster.controller.handle_report(report_of()).paused
    cluster.controller.update_backlog(Backlog(tokens=10.0, seconds=100.0), paused=False)
    assert not cluster.controller.handle_report(report_of()).paused
    assert not Cluster(plan_of()).controller.handle_report(report_of()).paused


def test_a_job_whose_only_worker_said_nothing_new_for_long_has_no_worker() -> None:
    cluster = told(2e6, 100.0)
    first = cluster.plants[0].report()
    cluster.controller.handle_report(first)
    cluster.clock.now_s += 60
    assert cluster.controller.handle_report(first).thresholds == {"standard": 0.95}
    assert cluster.controller.status().replicas == ()
