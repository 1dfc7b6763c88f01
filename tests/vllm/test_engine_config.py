"""The configuration that vLLM makes for our architectures, without an engine."""

import json
import pickle
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

from tests.vllm.interpreted import BUNDLED  # noqa: I001

import vllm
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from mars_ray.errors import ConfigError


def config(**mars: Any) -> VllmConfig:
    [architecture] = json.loads((BUNDLED / "config.json").read_text())["architectures"]
    return EngineArgs(
        model=str(BUNDLED),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=4,
        hf_overrides={"architectures": [f"Mars{architecture}"]},
        additional_config={"mars": mars},
    ).create_engine_config()


def test_vllm_chooses_model_runner_v2_and_checks_requests_also_in_a_process_that_got_the_configuration():
    sent = pickle.loads(pickle.dumps(config()))
    assert sent.use_v2_model_runner
    assert [*sent.model_config.logits_processors] == ["mars_ray.vllm.runner.request_checks:MarsRequestChecks"]


def test_an_unknown_version_is_refused_unless_it_is_to_be_tried(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises((ConfigError, ValueError), match=r"vLLM is 0\.99\.0; the plug-in was tried with 0\.29"):
        config()
    assert config(any_version=True).additional_config["mars"]["any_version"]
