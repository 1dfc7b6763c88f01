"""The data files of a run: records that are dropped are reported, and the files stay the same from start to end."""

import json
from pathlib import Path

import pytest

import mars_ray
from mars_ray.errors import ConfigError, DataError
from mars_ray.training.config import TrainConfig
from mars_ray.training.ray_trainer import data_losses
from tests.training.train_samples import RECORDS, MakeConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]
BAD = [{"prompt": "who?"}, {"prompt": "why?", "response": ""}, {"prompt": "when?"}]


def write(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def with_data(make_config: MakeConfig, train: Path, heldout: Path, max_dropped: float) -> TrainConfig:
    data = {"train": str(train), "heldout": str(heldout), "length": 64, "max_dropped": max_dropped}
    return make_config(data=data, optimizer={"learning_rate": 1e-3, "epochs": 1, "batch_rows": 4}, measure_every=100)


def test_a_run_reports_what_it_drops_and_refuses_other_data(
    make_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train = write(tmp_path / "mixed.jsonl", [*BAD, *RECORDS[:12]])
    heldout = write(tmp_path / "heldout.jsonl", RECORDS[:12])
    loss = (
        "mixed.jsonl: 3 of 15 records dropped: 2 x it has no 'response' or 'completion' to its 'prompt' "
        "(first: record 1), 1 x it has no response: there is nothing to learn from it (first: record 2)"
    )
    with pytest.raises(DataError) as refused:
        mars_ray.train(with_data(make_config, train, heldout, 0.1))
    assert loss in str(refused.value)

    allowing = with_data(make_config, train, heldout, 0.2)
    mars_ray.train(allowing)  # in the same folder
    assert f"train: {loss}" in capfd.readouterr().err
    assert data_losses(allowing) == {str(train): loss}

    write(heldout, RECORDS[:11])
    with pytest.raises(ConfigError, match=r"heldout\.jsonl has changed since the run in .*/run began"):
        mars_ray.train(allowing)
    write(heldout, RECORDS[:12])
    train.unlink()
    assert mars_ray.train(allowing).step > 0
