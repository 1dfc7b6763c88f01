"""A job on three machines, and what happens to them: no row is lost or there twice, and the job ends by itself."""

import time
from collections.abc import Callable

import pytest

from tests.machines.job import Job
from tests.machines.machines import Machine

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROWS = 30_000
CUT_OFF_S = 30


def lose_power(machine: Machine) -> None:
    machine.power_off()


def be_cut_off(machine: Machine) -> None:
    machine.cut_off_for(CUT_OFF_S)


@pytest.mark.parametrize(("number", "fault"), [(2, lose_power), (1, be_cut_off)])
def test_every_row_is_answered_once_whatever_happens_to_a_machine(
    nodes: list[Machine], number: int, fault: Callable[[Machine], None]
) -> None:
    job = Job(nodes[0], fault.__name__, rows=ROWS)
    job.start()
    began_s = time.monotonic()
    fault(nodes[number])
    code = job.end()
    print(f"{fault.__name__}: {time.monotonic() - began_s:.0f} s from the fault to the end\n{job.said}")
    assert code == 0
    assert job.whole()
