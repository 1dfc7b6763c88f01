"""Batches on an endpoint: they cost callers no quality and add no replica, unless their deadline needs it."""

from mars_ray.control.cluster_load import Backlog
from mars_ray.control.control_settings import PolicyName
from mars_ray.control.core.controller import Controller
from mars_ray.control.core.status import ClassStatus
from mars_ray.engine.service_class import BATCH_CLASS, ServiceClass
from mars_ray.engine.stats.state import ClassState
from tests.control.control_samples import class_state, plan_of, report, requests_at
from tests.factories.clock import Clock

CLASSES = (ServiceClass(floor=0.5), ServiceClass(name=BATCH_CLASS, priority=-1, floor=0.5))


def state_of(
    name: str, threshold: float, share: float, second: int, waiting: int, prompt_tokens: int = 20
) -> ClassState:
    """Return the state of a class whose requests take a share of one replica's time."""
    arrived = round(share * requests_at(1.0) * second)
    return class_state(
        name,
        threshold=threshold,
        running=1,
        waiting=waiting,
        arrived=arrived,
        prompt_tokens=prompt_tokens * arrived,
        ended=arrived,
        tokens=64 * arrived,
    )


def run(policy: PolicyName, backlog: Backlog | None, prompt_tokens: int = 20) -> tuple[int, list[ClassStatus]]:
    """Return the desired replicas and the classes after a minute in which callers take 0.3 of a replica, and rows
    arrive as fast as three replicas would answer them."""
    clock = Clock()
    controller = Controller(plan_of(*CLASSES, policy=policy), clock=clock, unix_clock=clock)
    thresholds = {"standard": 0.95, BATCH_CLASS: 0.95}
    for second in range(60):
        if backlog is not None:
            controller.update_backlog(backlog, paused=False)
        callers = state_of("standard", thresholds["standard"], 0.3, second, waiting=0)
        rows = state_of(BATCH_CLASS, thresholds[BATCH_CLASS], 3.0, second, 12, prompt_tokens)
        thresholds = dict(controller.handle_report(report(second + 1, clock.now_s, callers, rows)).thresholds)
        clock.now_s += 1
    status = controller.status()
    return status.desired_replicas, list(status.classes)


def test_rows_beyond_the_capacity_lower_nothing_and_add_no_replica_while_the_deadline_is_far() -> None:
    replicas, classes = run("capacity", Backlog(tokens=1e6, seconds=1e6))
    assert (replicas, [each.threshold for each in classes]) == (1, [0.95, 0.95])
    assert run("capacity", Backlog(tokens=1e6, seconds=None))[0] == 1


def test_batches_that_would_be_late_get_their_floor_and_replicas_and_callers_keep_their_threshold() -> None:
    replicas, classes = run("capacity", Backlog(tokens=1e6, seconds=60.0))
    assert replicas > 1
    assert [each.threshold for each in classes] == [0.95, 0.5]
    assert "late" in classes[1].reason


def test_reading_the_prompts_of_rows_takes_time_until_their_deadline() -> None:
    backlog = Backlog(tokens=2000, seconds=60.0)
    assert run("capacity", backlog)[0] == 1
    replicas, classes = run("capacity", backlog, prompt_tokens=20_000)
    assert replicas > 1 and "late" in classes[1].reason


def test_the_policy_fixed_lowers_nothing_for_batches() -> None:
    _, classes = run("fixed", Backlog(tokens=1e6, seconds=60.0))
    assert [each.threshold for each in classes] == [0.95, 0.95]


def test_rows_on_a_replica_with_many_callers_keep_their_threshold() -> None:
    clock = Clock()
    controller = Controller(plan_of(*CLASSES), clock=clock, unix_clock=clock)
    lowest = {"standard": 0.95, BATCH_CLASS: 0.95}
    for second in range(60):
        controller.update_backlog(Backlog(tokens=1e6, seconds=1e6), paused=False)
        for replica, share in (("a", 3.0), ("b", 0.1)):
            states = (
                state_of("standard", 0.95, share, second, waiting=0),
                state_of(BATCH_CLASS, 0.95, 0.5, second, waiting=12),
            )
            directive = controller.handle_report(report(second + 1, clock.now_s, *states, replica=replica))
            lowest = {name: min(low, directive.thresholds[name]) for name, low in lowest.items()}
        clock.now_s += 1
    assert lowest["standard"] < 0.95 and lowest[BATCH_CLASS] == 0.95


def test_without_batches_the_class_follows_its_own_requests() -> None:
    assert run("capacity", None)[0] > 1
