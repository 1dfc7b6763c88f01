"""A run in a folder has the settings with which it began, and a wrong setting leaves no run behind."""

from pathlib import Path

import pytest

import mars_ray
from mars_ray.errors import AdapterError, ConfigError
from mars_ray.training.run_folder import RunFolder
from tests.training.train_samples import MakeConfig

BEGUN = {"seed": 3, "data": {"length": 64}, "objective": {"block": 4, "adapter": {"rank": 8}}}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (BEGUN | {"seed": 4}, "seed was 3, now it is 4"),
        (BEGUN | {"data": {"length": 64, "overlong": "truncate"}}, 'data.overlong was not set, now it is "truncate"'),
        (BEGUN | {"objective": {"block": 4, "adapter": None}}, "objective.adapter.rank was 8, now it is not set"),
    ],
)
def test_a_setting_that_changed_is_named(tmp_path: Path, now: dict[str, object], said: str) -> None:
    folder = RunFolder(tmp_path)
    folder.keep_settings(BEGUN)
    folder.check_settings({**BEGUN, "patience": None})
    with pytest.raises(ConfigError) as refused:
        folder.check_settings(now)
    assert said in str(refused.value)


def test_a_layer_that_the_model_lacks_is_refused_before_anything_is_written(make_config: MakeConfig) -> None:
    config = make_config(objective={"kind": "mars", "block": 4, "adapter": {"rank": 4, "target_modules": ["zz"]}})
    with pytest.raises(AdapterError, match="target_modules has 'zz'"):
        mars_ray.train(config)
    assert not Path(str(config.output)).exists()
