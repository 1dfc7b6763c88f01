"""A training run on several machines and what happens to them: it ends with the metrics of an undisturbed run."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machines.conftest import TOKEN
from tests.machines.machines import Machine, Network, join_cluster, start_store
from tests.machines.training import TrainingRun

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(2400)]
EPOCHS, CHECKPOINT_EVERY = 24, 20
FAULT_EVERY = 40
UNSEEN = 20
"""Steps that may be done when the metrics in the store do not tell yet."""
CUT_OFF_S = 30


@pytest.fixture
def machines(lan: Network) -> list[Machine]:
    """A head that has the store and no workers, and two machines with two workers each."""
    machines = [lan.machine() for _ in range(3)]
    start_store(machines[0], machines, bucket="runs")
    for each in machines:
        each.set_up_for_ray(TOKEN)
    join_cluster(machines, head_cpus=0, cpus=2)
    return machines


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_run_through_four_faults_ends_as_if_nothing_had_been(
    lan: Network, machines: list[Machine], start_model: Path, sharding: str
) -> None:
    """A worker is killed; a machine loses power and another joins; the driver is killed and its command given on
    another machine; a machine is cut off and comes back. Each happens in the middle of the run."""
    head, first, lost = machines
    run, undisturbed = (TrainingRun(name, EPOCHS, CHECKPOINT_EVERY, sharding) for name in ("disturbed", "undisturbed"))
    for each in (first, head):
        run.prepare(each, start_model)
    driver = run.start(first)
    steps = run.steps(head)
    seconds = {"a worker": seconds_lost(steps, FAULT_EVERY, lambda: kill(lost, "ray::RayTrainWorker"))}

    joins = lan.machine()
    joins.environment |= head.environment
    joins.set_up_for_ray(TOKEN)

    def replace() -> None:
        lost.power_off()
        joins.join(head, num_cpus=2)

    seconds["a machine"] = seconds_lost(steps, 2 * FAULT_EVERY, replace)

    def go_on_elsewhere() -> None:
        nonlocal driver
        kill(first, "mars-ray train")
        driver.communicate()
        driver = run.start(head)

    seconds["the driver"] = seconds_lost(steps, 3 * FAULT_EVERY, go_on_elsewhere)

    def be_cut_off() -> None:
        joins.cut_off_for(CUT_OFF_S)
        joins.wait_for_end("raylet")
        joins.join(head, num_cpus=2)

    seconds["the network"] = seconds_lost(steps, 4 * FAULT_EVERY, be_cut_off)
    run.finish(driver)
    print(f"seconds from the loss of … until steps went on: {seconds}")

    undisturbed.prepare(head, start_model)
    undisturbed.finish(undisturbed.start(head))
    assert run.measured(head) == undisturbed.measured(head)


def seconds_lost(steps: Iterator[int], at: int, fault: Callable[[], None]) -> int:
    """Return the seconds from a fault at a step until one is done that was not before it."""
    reached = next(step for step in steps if step >= at)
    began_s = time.monotonic()
    fault()
    next(step for step in steps if step > reached + UNSEEN)
    return round(time.monotonic() - began_s)


def kill(machine: Machine, program: str) -> None:
    """kill -9 the newest process of a program on a machine."""
    machine.run("pkill", "-9", "--newest", "--full", program)
