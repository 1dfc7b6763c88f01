"""`mars-ray train` over machines that share no disk: model and records lie on the driver's, the run in a store."""

from pathlib import Path

import pytest

from tests.machines.conftest import TOKEN
from tests.machines.machines import Machine, Network
from tests.machines.training import TrainingRun

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_four_workers_on_two_machines_have_the_losses_of_four_on_one(
    lan: Network, nodes: list[Machine], start_model: Path
) -> None:
    alone = lan.machine()
    alone.environment = dict(nodes[0].environment)
    alone.set_up_for_ray(TOKEN)
    alone.join(alone, num_cpus=4)
    spread, together = TrainingRun("spread"), TrainingRun("together")
    for run, driver in ((spread, nodes[0]), (together, alone)):
        run.prepare(driver, start_model)
        run.finish(run.start(driver))
    assert spread.measured(nodes[0]) == together.measured(nodes[0])
