"""The modelled time of a step: a roofline, on known and on described machines."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.errors import ConfigError
from mars_ray.machines.registry import step_model
from mars_ray.machines.step_model import EFFICIENCIES, GPUS, NETWORKS, StepModel

H200 = step_model("h200/qwen2.5-7b")
GPU = {"memory_gb": 80, "bandwidth_gb_per_s": 1000, "bf16_tflops": 100, "dollars_per_hour": 1}
NETWORK = {"billion_parameters": 1, "layers": 10, "key_heads": 2, "head_size": 50, "max_model_len": 4096}
EFFICIENCY = {"share": 0.5, "overhead_ms": 3, "seq_ms": 0.25}
FILE: dict[str, Any] = {"gpu": GPU, "network": NETWORK, "efficiency": EFFICIENCY}


def plain(model: StepModel, **work: int) -> float:
    return model.seconds(**({"num_seqs": 1, "positions": 1, "kv_tokens": 0, "prompt_tokens": 0} | work))


@pytest.fixture
def described(tmp_path: Path) -> StepModel:
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(FILE))
    return step_model(str(path))


def test_a_small_step_takes_the_reading_of_weights_and_cache(described: StepModel) -> None:
    # 2 GB of weights and 1,000 tokens of 4,000 bytes at half of 1,000 GB/s, 3 ms, and 2 sequences of 0.25 ms
    seconds = plain(described, num_seqs=2, positions=2, kv_tokens=1000)
    assert seconds == pytest.approx((2e9 + 4e6) / 0.5e12 + 0.003 + 2 * 0.00025)


def test_a_large_step_takes_the_operations_of_its_positions_and_prompts(described: StepModel) -> None:
    # 2,000 positions of 2 x 10^9 operations at half of 100 TFLOP/s
    seconds = plain(described, positions=500, kv_tokens=1000, prompt_tokens=1500)
    assert seconds == pytest.approx(2000 * 2e9 / 0.5e14 + 0.003 + 0.00025)


work = {
    "num_seqs": st.integers(0, 256),
    "positions": st.integers(0, 4096),
    "kv_tokens": st.integers(0, 10**6),
    "prompt_tokens": st.integers(0, 8192),
}


@given(**work, field=st.sampled_from(sorted(work)), more=st.integers(1, 1000))
def test_more_work_never_takes_less_time(field: str, more: int, **fields: int) -> None:
    assert H200.seconds(**(fields | {field: fields[field] + more})) >= H200.seconds(**fields)


@pytest.mark.parametrize(("gpu", "free"), [("h200", 200), ("h100", 300), ("a100-80g", 150), ("l4", 400)])
def test_positions_are_free_until_operations_take_as_long_as_reading(gpu: str, free: int) -> None:
    model = step_model(f"{gpu}/qwen2.5-7b")
    assert plain(model, positions=free * 9 // 10) == pytest.approx(plain(model))
    assert plain(model, positions=free * 13 // 10) > 1.05 * plain(model)


def test_8_bit_weights_are_read_and_computed_in_half_the_time() -> None:
    small = step_model("h200/qwen2.5-7b-fp8")
    assert small.weights_s == pytest.approx(H200.weights_s / 2)
    assert small.position_s == pytest.approx(H200.position_s / 2, rel=0.01)
    assert small.kv_token_s == H200.kv_token_s


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("efficiency", EFFICIENCIES)
def test_every_known_network_fits_every_known_gpu(gpu: str, network: str, efficiency: str) -> None:
    model = step_model(f"{gpu}/{network}/{efficiency}")
    assert model.max_kv_tokens > 8192
    assert 0 < plain(model) < 1


@pytest.mark.parametrize(
    ("network", "kv_bytes"),
    [("qwen2.5-0.5b", 12288), ("qwen2.5-7b", 57344), ("llama-3.1-8b", 131072), ("qwen3-4b", 147456)],
)
def test_a_token_takes_keys_and_values_of_all_layers_in_the_cache(network: str, kv_bytes: int) -> None:
    assert NETWORKS[network].kv_bytes == kv_bytes


def test_every_figure_of_the_tables_has_a_source() -> None:
    for gpu in GPUS.values():
        assert gpu.source.startswith("https://")
    for network in NETWORKS.values():
        assert network.source.startswith("https://")
    assert all(efficiency.source for efficiency in EFFICIENCIES.values())


def test_the_profile_is_that_of_vllm_unless_named() -> None:
    assert H200.name == "h200/qwen2.5-7b/vllm"
    assert step_model("h200/qwen2.5-7b/paper").efficiency == EFFICIENCIES["paper"]


def test_a_file_may_name_what_is_known_and_may_be_json(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"gpu": "l4", "network": "qwen2.5-0.5b", "weights": "fp8"}))
    model = step_model(str(path))
    assert model.gpu == GPUS["l4"]
    assert model.weights == "fp8"
    assert model.efficiency == EFFICIENCIES["vllm"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("h300/qwen2.5-7b", ["gpu 'h300' is unknown", "h200, h100, a100-80g"]),
        ("h200/gpt-5", ["network 'gpt-5' is unknown", "qwen2.5-7b"]),
        ("h200/qwen2.5-7b/sglang", ["efficiency 'sglang' is unknown", "vllm, vllm-0.32, paper"]),
        ("h200", ["machine 'h200' is unknown", "GPU/NETWORK", "qwen3-4b"]),
        ("", ["machine '' is unknown"]),
        ("h200//vllm", ["machine 'h200//vllm' is unknown"]),
        ("a100-80g/qwen2.5-7b-fp8", ["no fp8 rate"]),
        ("nowhere.yaml", ["nowhere.yaml cannot be read"]),
    ],
)
def test_an_unknown_machine_is_one_line_with_what_is_known(name: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        step_model(name)
    assert "\n" not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"gpu": "h300"}, ["gpu 'h300' is unknown"]),
        ({"gpus": 8}, ["gpus is unknown", "gpu, network, efficiency, weights"]),
        ({"gpu": GPU | {"bandwith": 3}}, ["gpu.bandwith is unknown", "bandwidth_gb_per_s"]),
        ({"gpu": GPU | {"bandwidth_gb_per_s": -1}}, ["gpu.bandwidth_gb_per_s is -1", "greater than 0"]),
        ({"network": NETWORK | {"layers": 0}}, ["network.layers is 0"]),
        ({"network": NETWORK | {"billion_parameters": 1e6}}, ["network.billion_parameters is 1000000"]),
        ({"network": NETWORK | {"billion_parameters": 100}}, ["weights of 200.0 GB", "90% of 80 GB"]),
        ({"efficiency": EFFICIENCY | {"share": 1.2}}, ["efficiency.share is 1.2"]),
        ({"efficiency": EFFICIENCY | {"share": float("nan")}}, ["efficiency.share is nan"]),
        ({"weights": "int4"}, ["weights is 'int4'", "'bf16' or 'fp8'"]),
        ({"network": 7}, ["network is 7"]),
    ],
)
def test_a_wrong_machine_file_is_one_line_with_key_and_value(
    tmp_path: Path, change: dict[str, Any], parts: list[str]
) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(FILE | change))
    with pytest.raises(ConfigError) as raised:
        step_model(str(path))
    assert "\n" not in str(raised.value)
    for part in (str(path), *parts):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [("- h200", "must hold a mapping"), ("{gpu: [", "is not YAML"), ("{gpu: l4}", "network is missing")],
)
def test_a_file_that_is_no_mapping_of_parts_is_named(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        step_model(str(path))


def test_a_step_takes_at_least_the_work_of_the_processor(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(FILE | {"efficiency": EFFICIENCY | {"host_ms": 10, "host_seq_ms": 1}}))
    assert plain(step_model(str(path)), num_seqs=3) == pytest.approx(0.013)


def test_computing_has_a_share_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(FILE | {"efficiency": EFFICIENCY | {"compute_share": 0.25}}))
    assert plain(step_model(str(path)), positions=2000) == pytest.approx(2000 * 2e9 / 0.25e14 + 0.003 + 0.00025)


@pytest.mark.parametrize(
    ("network", "callers", "measured_ms"),
    [("0.5b", 1, 1.53), ("0.5b", 32, 2.85), ("7b", 1, 4.87), ("7b", 32, 5.17), ("7b", 128, 6.05)],
)
def test_the_profile_of_our_own_run_gives_its_steps(network: str, callers: int, measured_ms: float) -> None:
    model = step_model(f"h200/qwen2.5-{network}/vllm-0.32")
    seconds = plain(model, num_seqs=callers, positions=callers, kv_tokens=160 * callers)
    assert seconds == pytest.approx(measured_ms / 1000, rel=0.2)
