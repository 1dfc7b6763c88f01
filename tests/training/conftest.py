"""Fixtures of a tiny run."""

import json
from pathlib import Path
from typing import Any

import pytest

from mars_ray.training.config import TrainConfig, parse_config
from tests.training.train_samples import RECORDS, MakeConfig


@pytest.fixture(scope="session")
def records_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


@pytest.fixture
def make_config(start_model: Path, records_file: Path, tmp_path: Path) -> MakeConfig:
    """A factory of configs; keyword arguments replace whole sections or values."""

    def make(name: str = "run", **changes: Any) -> TrainConfig:
        fields: dict[str, Any] = {
            "model": str(start_model),
            "output": str(tmp_path / name),
            "data": {"train": str(records_file), "heldout": str(records_file), "length": 64},
            "objective": {"kind": "mars", "block": 4},
            "optimizer": {"learning_rate": 1e-2, "epochs": 2, "batch_rows": 4},
            "checkpoint_every": 5,
            "measure_every": 4,
            "seed": 3,
        }
        return parse_config(fields | changes, "the test")

    return make
