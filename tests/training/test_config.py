"""A wrong setting is found when the file is read, and named."""

from pathlib import Path

import pytest

import mars_ray
from mars_ray.errors import AdapterError, ConfigError
from mars_ray.training.config import TrainConfig, read_config

GOOD = """
model: bundled
output: runs/x
data: {train: a.jsonl, heldout: b.jsonl}
objective: {kind: mars}
optimizer: {learning_rate: 1.0e-3, epochs: 1}
"""


def read(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_config(path)


def test_a_config_needs_no_more_than_what_has_no_default(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD)
    objective = config.objective
    assert (objective.block, objective.growth, objective.phase) == (16, True, "random")
    assert config.compute.workers == 1


def test_data_by_url_reaches_workers_by_url(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD.replace("a.jsonl", "s3://bucket/a.jsonl"))
    again = TrainConfig.model_validate(config.model_dump(mode="json"))
    assert (str(again.data.train), again.data) == ("s3://bucket/a.jsonl", config.data)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("train: a.jsonl", "train: 3", r"data.train is 3, must be a path or URL"),
        ("heldout: b.jsonl", "heldout: b.jsonl, max_dropped: 2", r"data.max_dropped is 2, must be at most 1"),
        ("epochs: 1", "epoch: 1", r"optimizer.epoch is not a setting"),
        ("epochs: 1", "epochs: -1", r"optimizer.epochs is -1, must be above 0"),
        ("epochs: 1", "epochs: .inf", r"optimizer.epochs is inf"),
        ("epochs: 1}", "epochs: 1}\nseed: 20261128093015", r"seed is 20261128093015"),
        ("kind: mars", "kind: marz", r"objective.kind is 'marz', must be 'ar' or 'mars'"),
        ("kind: mars", "kind: mars, block: 1", r"objective.block is 1, must be at least 2"),
        ("kind: mars", "kind: ar, block: 4, decay: 0.5", r"objective is .*: block, decay: only kind mars"),
        ("kind: mars", "kind: mars, adapter: {target_modules: []}", r"adapter.target_modules"),
        ("kind: mars", "kind: mars, adapter: {rank: 4}, ar_weight: 0.5", r"ar_weight trains the model itself"),
        (
            "kind: mars",
            "kind: ar, adapter: {rank: 4}",
            r"(adapter, distill|distill, adapter): only kind mars",
        ),
        ("model: bundled", "modle: bundled", r"model is missing.*modle is not a setting"),
        ("epochs: 1", "epochs: 1, batch_rows: 3}\ncompute: {workers: 2", r"batch_rows is 3, which 2 workers"),
        ("epochs: 1", "epochs: 1}\ncompute: {sharding: fsdp", r"sharding is fsdp, .* but compute.workers is 1; set 2"),
        ("{train: a.jsonl, heldout: b.jsonl}", "a.jsonl", r"data is 'a.jsonl'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, GOOD.replace(old, new))


@pytest.mark.parametrize(("given", "expected"), [("", 1.0), (", distill: 0.5", 0.5)])
def test_the_model_teaches_its_adapter_unless_told_otherwise(tmp_path: Path, given: str, expected: float) -> None:
    config = read(tmp_path, GOOD.replace("kind: mars", "kind: mars, adapter: {rank: 8}" + given))
    assert config.objective.distill == expected
    assert read(tmp_path, GOOD).objective.distill == 0.0


@pytest.mark.parametrize(("text", "named"), [("", "holds no settings"), ("a: [", "cannot be read as YAML")])
def test_a_file_without_settings_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no config .*nowhere.yaml"):
        read_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("path", sorted(Path("pipelines").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_we_ship_can_be_read(path: Path) -> None:
    read_config(path)


def test_a_layer_that_the_model_lacks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD.replace("kind: mars", "kind: mars, adapter: {target_modules: [zz]}"))
    config = config.model_copy(update={"output": tmp_path / "run"})
    with pytest.raises(AdapterError, match="target_modules has 'zz'"):
        mars_ray.train(config)
    assert not (tmp_path / "run").exists()
