"""Machines that are not as they should be: the clock of one is an hour off, another has half the speed or a full disk.
No row of a job is lost or there twice, and callers of an endpoint are answered."""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tests.machines.conftest import TOKEN
from tests.machines.endpoint import Endpoint, start_endpoint
from tests.machines.faults import asking, full_disk, half_speed, seen, until
from tests.machines.job import Job
from tests.machines.machines import Machine, Network, join_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
WRONG_CLOCK, AHEAD_S = Path(__file__).with_name("wrong_clock.c"), 3600
ROWS, DISK = 20_000, "600m"
Fault = Callable[[Machine], AbstractContextManager[object]]
FAULTS: list[Fault] = [nullcontext, half_speed, full_disk]


@pytest.fixture(scope="module")
def odd(lan: Network) -> list[Machine]:
    """The head, a machine whose clock is an hour ahead, and one with a small disk."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for a clock that is off")
    _, clock, _ = machines = [lan.machine(), lan.machine(), lan.machine(disk=DISK)]
    for each in machines:
        each.set_up_for_ray(TOKEN)
    clock.run("cc", "-shared", "-fPIC", f"-DAHEAD={AHEAD_S}", "-o", "/tmp/clock.so", WRONG_CLOCK)
    clock.environment["LD_PRELOAD"] = "/tmp/clock.so"
    ahead_s = float(clock.run("python", "-c", "import time; print(time.time())").stdout) - time.time()
    assert abs(ahead_s - AHEAD_S) < 60
    join_cluster(machines, head_cpus=1, cpus=2)
    return machines


def ended(job: Job, name: str) -> int:
    """Wait for the end of a job; return its exit code."""
    began_s = time.monotonic()
    code = job.end()
    print(f"\njob, {name}: exit code {code} after {time.monotonic() - began_s:.0f} s: {job.said[-300:]}")
    return code


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_with_a_worker_on_each_answers_every_row_once(odd: list[Machine], fault: Fault) -> None:
    head, _, disk = odd
    job = Job(head, fault.__name__, rows=ROWS)
    job.start()
    with fault(disk):
        code = ended(job, f"clock off, {fault.__name__}")
    assert code == 0
    assert job.whole()


def test_a_job_whose_own_clock_is_off_answers_every_row_once(odd: list[Machine]) -> None:
    job = Job(odd[1], "own", rows=ROWS)
    job.start()
    assert ended(job, "its own clock off") == 0
    assert job.whole()


def test_a_job_whose_own_disk_is_full_says_so_and_goes_on_when_there_is_room(odd: list[Machine]) -> None:
    job = Job(odd[2], "full", rows=ROWS)
    job.start()
    with full_disk(odd[2]):
        assert ended(job, "its own disk full") == 1
    assert "Make room" in job.said
    assert "Traceback" not in job.said
    job.start()
    assert ended(job, "room again") == 0
    assert job.whole()


@pytest.fixture(scope="module")
def endpoint(odd: list[Machine]) -> Endpoint:
    return start_endpoint(odd, gateways=3, engines=3)


@pytest.mark.parametrize("fault", FAULTS)
def test_callers_of_an_endpoint_with_an_engine_on_each_are_answered(endpoint: Endpoint, fault: Fault) -> None:
    disk = endpoint.nodes[2]
    until(lambda: len(seen(endpoint)) == 3)
    with asking(endpoint, endpoint.nodes, 40) as asked, fault(disk):
        time.sleep(30)
    print(f"\ncallers, clock off, {fault.__name__}: {asked}")
    until(lambda: len(seen(endpoint)) == 3)
    assert not asked.failed
