"""`mars-ray train` over machines that share no disk: model and records lie on the driver's, the run in a store."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.machines.machines import Machine, Network
from tests.training.train_samples import RECORDS

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_four_workers_on_two_machines_have_the_losses_of_four_on_one(
    lan: Network, nodes: list[Machine], start_model: Path
) -> None:
    alone = lan.machine()
    alone.environment = dict(nodes[0].environment)
    alone.join(alone, num_cpus=4)
    assert losses(nodes[0], start_model, "s3://runs/spread") == losses(alone, start_model, "s3://runs/alone")


def losses(driver: Machine, start_model: Path, output: str) -> list[dict[str, Any]]:
    """Train where `driver` is; return what each step measured that is not time."""
    driver.copy(start_model, "start")
    driver.write("records.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS))
    config = {
        "model": "start",
        "output": output,
        "data": {"train": "records.jsonl", "heldout": "records.jsonl", "length": 64},
        "objective": {"kind": "mars", "block": 4},
        "optimizer": {"learning_rate": 1e-2, "epochs": 2, "batch_rows": 4},
        "compute": {"workers": 4},
        "checkpoint_every": 5,
        "measure_every": 4,
        "seed": 3,
    }
    driver.write("run.yaml", yaml.safe_dump(config))
    driver.run("mars-ray", "train", "--config", "run.yaml", timeout=300)
    lines = driver.run("python", "-c", READ, f"{output}/metrics.jsonl").stdout.splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "tokens_per_s"} for line in lines]


READ = "import sys; from upath import UPath; print(UPath(sys.argv[1]).read_text(), end='')"
