"""A training run on several machines: its command, how far it is, and what it measured."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.machines.machines import Machine
from tests.training.train_samples import RECORDS

FOLLOW = """
import sys, time
from mars_ray.storage.location import locate
from mars_ray.training.metrics import follow_metrics
for step in follow_metrics(locate(sys.argv[1])):
    if step is None:
        time.sleep(0.1)
    else:
        print(step.step, flush=True)
"""
SECONDS = 400
READ = "import sys; from upath import UPath; print(UPath(sys.argv[1]).read_text(), end='')"


@dataclass(frozen=True)
class TrainingRun:
    """A run of four workers, whose folder is in the store."""

    name: str
    epochs: int = 2
    checkpoint_every: int = 5
    sharding: str = "ddp"

    @property
    def output(self) -> str:
        return f"s3://runs/{self.name}"

    def prepare(self, driver: Machine, start_model: Path) -> None:
        """Put on a machine what its command reads: the config, the model and the records."""
        driver.run("rm", "-rf", "start")
        driver.copy(start_model, "start")
        driver.write("records.jsonl", "".join(json.dumps(record) + "\n" for record in RECORDS))
        config = {
            "model": "start",
            "output": self.output,
            "data": {"train": "records.jsonl", "heldout": "records.jsonl", "length": 64},
            "objective": {"kind": "mars", "block": 4},
            "optimizer": {"learning_rate": 1e-2, "epochs": self.epochs, "batch_rows": 4},
            "compute": {"workers": 4, "sharding": self.sharding},
            "checkpoint_every": self.checkpoint_every,
            "measure_every": 4,
            "seed": 3,
        }
        driver.write(f"{self.name}.yaml", yaml.safe_dump(config))

    def start(self, driver: Machine) -> "subprocess.Popen[str]":
        """Begin, or go on, from a machine."""
        return driver.start("mars-ray", "train", "--config", f"{self.name}.yaml", stderr=subprocess.PIPE)

    def finish(self, job: "subprocess.Popen[str]") -> None:
        """Wait for the end of the run."""
        _, said = job.communicate(timeout=SECONDS)
        assert job.returncode == 0, said

    def steps(self, machine: Machine) -> Iterator[int]:
        """Yield the steps that are done, as a machine sees them in the store; some may come again."""
        following = machine.start(sys.executable, "-c", FOLLOW, self.output, stdout=subprocess.PIPE)
        assert following.stdout is not None
        with following:
            try:
                yield from map(int, following.stdout)
            finally:
                following.kill()

    def measured(self, machine: Machine) -> list[dict[str, Any]]:
        """Return what each step measured that is not time."""
        lines = machine.run(sys.executable, "-c", READ, f"{self.output}/metrics.jsonl").stdout.splitlines()
        return [{name: value for name, value in json.loads(line).items() if name != "tokens_per_s"} for line in lines]
