"""What may stand in `--model_args`, and what is said of what may not."""

import subprocess
import sys
from typing import Any

import pytest

from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import ConfigError, ModelError
from mars_ray.harness.model import HarnessModel
from mars_ray.harness.settings import parse_settings
from mars_ray.method.metric import Metric


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "bundled", "treshold": 0.9}, "'treshold' is unknown; known arguments are model, mode, threshold"),
        ({"mode": "ar"}, "model is missing; give 'bundled' or a model folder"),
        ({"model": "bundled", "threshold": 1.5}, "threshold is 1.5; it must be a number from 0 to 1"),
        ({"model": "bundled", "metric": "entropy"}, "metric entropy needs a threshold"),
        ({"model": "bundled", "mode": "fast"}, "mode is 'fast', must be 'ar', 'threshold' or 'exact'"),
        ({"model": "bundled", "block": 0}, "block is 0; it must be a whole number, from 1 to 64"),
        ({"model": "bundled", "max_gen_toks": 0}, "max_gen_toks is 0, must be"),
        ({"model": "bundled", "dtype": "float16"}, "dtype is 'float16', must be"),
        ({"model": "bundled", "device": "tpu"}, "device is 'tpu': "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^model_args: {message}") as caught:
        HarnessModel(**arguments)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(ModelError, match="unknown model 'bundeld'"):
        HarnessModel(model="bundeld")


def test_a_folder_may_be_called_by_a_number() -> None:
    assert parse_settings({"model": 7}).model == "7"


def test_requests_look_ahead_as_the_settings_say() -> None:
    asked = parse_settings({"model": "bundled", "mode": "exact", "threshold": 0.5, "metric": "entropy"})
    assert asked.decode(block=4) == DecodeParams(mode=Mode.EXACT, threshold=0.5, metric=Metric.ENTROPY, block=4)
    assert parse_settings({"model": "bundled", "block": 3}).decode(block=4).block == 3


@pytest.mark.parametrize("given", [{"batch_size": 1, "max_batch_size": 64}, {"device": "cuda:0"}])
def test_what_the_command_line_gives_to_every_model_is_taken(given: dict[str, Any]) -> None:
    assert HarnessModel(model="bundled", **given).device.type in ("cpu", "cuda")


def test_without_the_extra_one_line_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['lm_eval'] = None; import mars_ray; from mars_ray.harness.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mars-ray: lm-evaluation-harness is not installed (")
    assert done.stderr.endswith("). Install mars-ray with the extra 'lm-eval'.\n")
    assert done.stderr.count("\n") == 1
