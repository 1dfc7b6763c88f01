"""`mars-ray evaluate` with workers on several machines: model and questions are on the driver's."""

import json
from typing import Any

import pytest

from mars_ray.evaluation.tasks import TaskOptions, open_tasks
from mars_ray.model.resolve import resolve_model
from tests.machines.conftest import TOKEN
from tests.machines.machines import Machine, Network, join_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
WORKERS = 4


def test_workers_on_all_machines_find_what_one_machine_finds(lan: Network) -> None:
    together, alone = [lan.machine() for _ in range(3)], lan.machine()
    for each in [*together, alone]:
        each.set_up_for_ray(TOKEN)
    join_cluster(together, head_cpus=2, cpus=2)
    spread = evaluated(together[0], workers=WORKERS)
    assert [len(decoders(each)) > 0 for each in together] == [True, True, True]
    alone.join(alone, num_cpus=2)
    assert spread == evaluated(alone, workers=1)


def evaluated(driver: Machine, *, workers: int) -> dict[str, Any]:
    """Evaluate what is on a machine; return all that was found but speed."""
    driver.copy(resolve_model("bundled"), "model")
    [task] = open_tasks(("date_rewrite",), TaskOptions(examples=24, seeds=1))
    rows = [{"messages": each.messages, "reference": each.reference} for each in task.questions]
    driver.write("dates.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    driver.run(
        "mars-ray", "evaluate", "--tasks", "dates.jsonl", "--output", "out", "--model", "model", "--seeds", "2",
        "--thresholds", "0.6", "--modes", "threshold", "--max-tokens", "48", "--workers", str(workers),
        timeout=280,
    )  # fmt: skip
    results: dict[str, Any] = json.loads(driver.run("cat", "out/results.json").stdout)
    del results["speed"]
    return results


def decoders(machine: Machine) -> list[str]:
    """Return the logs of the workers that ran on a machine."""
    logs = "/tmp/ray/session_latest/logs"
    return machine.run("grep", "-rl", ":actor_name:Decoder", logs, check=False).stdout.splitlines()
