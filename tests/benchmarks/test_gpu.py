"""What the measurements on a GPU compute from their raw figures."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.lines import append, last_run, read_lines
from benchmarks.gpu.run import TIE, TOKENS_PER_SEQ, equality, main, modelled_s
from benchmarks.gpu.settings import gpu_of, step_model
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
    stock = {
        "engine": "stock",
        "setting": "ar",
        "answers": [[1, 2]] * 3,
        "gaps": [[9.0, 9.0], [9.0, TIE / 2], [9.0, 9.0]],
    }
    mars = {"engine": "mars-3", "setting": "exact K 3", "answers": [[1, 2], [1, 3], [1, 3]]}
    assert equality([stock, mars, {"name": "ngram", "unavailable": "no"}]) == {
        "mars-3: exact K 3": {"equal": 1, "tied": 1, "other": 1}
    }


def test_a_modelled_step_reads_the_cache_of_all_requests() -> None:
    model = named_model("h100/qwen2.5-7b")
    expected_s = model.seconds(num_seqs=32, positions=32 * 7, kv_tokens=32 * TOKENS_PER_SEQ, prompt_tokens=0)
    assert modelled_s(model, 32, 32 * 7) == pytest.approx(expected_s)


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    append(file, {"callers": 1})
    with file.open("a") as lines:
        lines.write('{"callers": 8, "step')
    assert read_lines(file) == [{"callers": 1}]


def test_the_last_run_begins_with_the_last_machine() -> None:
    first: list[dict[str, Any]] = [{"machine": {}, "model": "bundled"}, {"callers": 1}]
    last: list[dict[str, Any]] = [{"machine": {}, "model": "smollm2"}, {"callers": 8}]
    assert last_run([*first, *last]) == last
    assert last_run([{"callers": 1}]) == [{"callers": 1}]


@pytest.mark.parametrize("engines", ["mars-0", "mars-x", "eagle", "stock,mars-64"])
def test_an_unknown_engine_is_refused_by_name(engines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run", "--engines", engines, "--json", str(tmp_path / "gpu.jsonl")])
    with pytest.raises(ConfigError, match=engines.split(",")[-1]):
        main()


@pytest.mark.slow
def test_a_measurement_without_vllm_is_reported_and_the_others_run(
    tmp_path: Path,
) -> None:
    file = tmp_path / "gpu.jsonl"
    words = ["--device", "cpu", "--small", "--part", "steps", "--part", "curve", "--engines", "stock"]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu.run", *words, "--json", str(file)], check=True)
    lines = read_lines(file)
    assert "steps-tiny-stock" in [line["name"] for line in lines if "unavailable" in line]
    assert any("eager_ms" in line for line in lines)


def test_the_step_model_has_the_shape_of_the_network() -> None:
    network = bundled_checkpoint().network
    parameters = sum(parameter.numel() for parameter in network.parameters())
    model = step_model("h100", network.config, parameters)
    assert model.weight_bytes == pytest.approx(2 * parameters)
    assert model.network.layers == network.config.num_hidden_layers
