"""What the measurements on a GPU compute from their raw figures."""

import pytest

from benchmarks.gpu.settings import gpu_of, step_model
from benchmarks.gpu.vllm_part import TIE, equality, predictions
from mars_ray.errors import ConfigError
from mars_ray.machines.registry import step_model as named_model
from tests.factories.engine import bundled_checkpoint


@pytest.mark.parametrize(
    ("device_name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
    ],
)
def test_a_device_name_finds_its_data_sheet(device_name: str, gpu: str) -> None:
    assert gpu_of(device_name) == gpu


def test_a_device_without_a_data_sheet_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="GeForce GTX 1080"):
        gpu_of("NVIDIA GeForce GTX 1080")


def test_answers_are_equal_or_differ_first_at_a_tie_or_elsewhere() -> None:
    stock = {"answers": {"ar": [[1, 2], [1, 2], [1, 2]]}, "gaps": [[9.0, 9.0], [9.0, TIE / 2], [9.0, 9.0]]}
    mars = {"answers": {"exact K 3": [[1, 2], [1, 3], [1, 3]]}}
    reports = {"stock": stock, "mars K 3": mars, "ngram": {"unavailable": "no"}}
    assert equality(reports) == {"mars K 3: exact K 3": {"equal": 1, "tied": 1, "other": 1}}


def test_a_prediction_counts_all_positions_of_a_step_and_the_measured_tokens() -> None:
    model = named_model("h100/qwen2.5-7b")
    row = {"setting": "exact K 3", "callers": 32, "tokens_per_s": 1.0, "tokens_per_step": 2.0}
    [predicted] = predictions({"mars K 3": {"masks": 3, "speed": [row]}}, model, tokens_per_seq=100)
    step_s = model.seconds(num_seqs=32, positions=32 * 7, kv_tokens=3200, prompt_tokens=0)
    assert predicted["modelled_tokens_per_s"] == pytest.approx(64 / step_s)


def test_the_step_model_has_the_shape_of_the_network() -> None:
    network = bundled_checkpoint().network
    parameters = sum(parameter.numel() for parameter in network.parameters())
    model = step_model("h100", network.config, parameters)
    assert model.weight_bytes == pytest.approx(2 * parameters)
    assert model.network.layers == network.config.num_hidden_layers
