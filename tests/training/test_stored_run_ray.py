"""A run whose folder is in a store: followed, stopped, and gone on with by a machine that has nothing of it."""

import threading
from pathlib import Path

import pytest
from upath import UPath

import mars_ray
from mars_ray.errors import ConfigError, InterruptedRunError, OutputError
from mars_ray.model.card import read_card
from mars_ray.model.sources.store import fetched_from_store
from mars_ray.storage import driver_lease
from mars_ray.storage.driver_lease import DriverLease
from mars_ray.training.metrics import follow_metrics, read_metrics
from mars_ray.training.run_folder import RunFolder
from tests.training.train_samples import MakeConfig

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.mark.slow
def test_a_run_in_a_store_goes_on_on_another_machine(
    make_config: MakeConfig, bucket: UPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = {"learning_rate": 1e-3, "epochs": 50, "batch_rows": 4}
    config = make_config(output=str(bucket / "runs" / "one"), optimizer=optimizer, checkpoint_every=1000)
    folder = RunFolder(config.output)

    def stop_after_the_first_step() -> None:
        next(step for step in follow_metrics(folder.path) if step)
        folder.ask_to_stop()

    threading.Thread(target=stop_after_the_first_step, daemon=True).start()
    with pytest.raises(InterruptedRunError, match=r"Stopped after \d+ steps, saved in s3://"):
        mars_ray.train(config)
    assert not folder.finished
    before = read_metrics(folder.path)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-machine"))
    last = mars_ray.train(config)
    metrics = read_metrics(folder.path)
    assert metrics[: len(before)] == before  # their times, too, so they were not done again
    assert [each.step for each in metrics] == list(range(1, last.steps + 1))
    assert folder.picture.stat().st_size > 10_000
    card = read_card(fetched_from_store(str(folder.model)))
    assert card is not None
    assert card.steps == last.steps
    with pytest.raises(ConfigError, match=r"s3://.*/runs/one holds a run with other settings: seed was 3, now"):
        mars_ray.train(config.model_copy(update={"seed": 4}))


def test_a_second_driver_is_refused(make_config: MakeConfig, bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_lease, "RENEW_S", 0.1)
    monkeypatch.setattr(driver_lease, "POLL_S", 0.1)
    folder = bucket / "runs" / "one"
    refused = pytest.raises(OutputError, match=r"process \d+ on .* is working in s3://.*/runs/one")
    with DriverLease(folder / "driver.json", of=folder).held(), refused:
        mars_ray.train(make_config(output=str(folder)))
