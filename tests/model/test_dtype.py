"""What a model is run in where nobody says: what its checkpoint, its size and the machine speak for."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mars_ray.engine.kernels.architectures import ARCHITECTURES
from mars_ray.model import dtype
from mars_ray.model.dtype import KERNEL_MODEL_TYPES, ResolvedDtype, resolve_dtype
from mars_ray.model.folder import WEIGHTS_FILE, count_parameters
from mars_ray.model.resolve import resolve_model

FAST, SLOW = "flags\t\t: fpu avx512f avx512_bf16\n", "flags\t\t: fpu avx512f\n"


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype, "LARGE", 100)


def machine(monkeypatch: pytest.MonkeyPatch, place: Path, text: str) -> None:
    (place / "cpuinfo").write_text(text)
    monkeypatch.setattr(dtype, "CPU_INFO", place / "cpuinfo")


def parameters(place: Path, of: torch.dtype, numbers: int = 200) -> Counter[str]:
    """Weights of so many numbers, beside a few of float32, as norms often are."""
    save_file({"weight": torch.zeros(numbers, dtype=of), "norm": torch.zeros(10)}, place / WEIGHTS_FILE)
    return count_parameters(place)


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize(
    ("stored", "cpu", "device", "expected"),
    [
        (torch.bfloat16, FAST, "cpu", "bfloat16"),
        (torch.float16, FAST, "cpu", "bfloat16"),
        (torch.bfloat16, "Features\t: fp asimd bf16\n", "cpu", "bfloat16"),
        (torch.bfloat16, SLOW, "cpu", "float32"),
        (torch.float16, SLOW, "cpu", "float32"),
        (torch.bfloat16, SLOW, "cuda", "bfloat16"),
        (torch.float32, FAST, "cpu", "float32"),
        (torch.float32, FAST, "cuda", "float32"),
    ],
)
def test_a_large_checkpoint_of_16_bits_runs_in_bfloat16_where_that_is_fast(
    stored: torch.dtype, cpu: str, device: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path, cpu)
    assert resolve_dtype("auto", parameters(tmp_path, stored), device).name == expected


def test_a_small_checkpoint_runs_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path, FAST)
    found = resolve_dtype("auto", parameters(tmp_path, torch.bfloat16), "cpu")
    assert found == ResolvedDtype("float32", "bfloat16 gains nothing for 0.0 million parameters")


def test_the_bundled_model_runs_in_float32_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path, FAST)
    assert {
        resolve_dtype("auto", count_parameters(resolve_model("bundled")), device).name for device in ("cpu", "cuda")
    } == {"float32"}


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    assert resolve_dtype("bfloat16", parameters(tmp_path, torch.float32), "cpu") == ResolvedDtype(
        "bfloat16", "asked for"
    )


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize(("model_type", "expected"), [("qwen2", "bfloat16"), ("gpt2", "float32")])
def test_the_engine_runs_bfloat16_on_every_processor_with_a_model_that_its_kernels_support(
    model_type: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path, SLOW)
    found = resolve_dtype("auto", parameters(tmp_path, torch.bfloat16), "cpu", model_type)
    assert found.name == expected and "fast" not in found.reason


def test_the_model_types_of_the_kernels_are_those_of_their_architectures() -> None:
    assert {network.config_class.model_type for network in ARCHITECTURES} == KERNEL_MODEL_TYPES


@pytest.mark.usefixtures("small_is_large")
def test_a_machine_that_says_nothing_of_itself_is_not_taken_for_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "CPU_INFO", tmp_path / "nothing")
    assert resolve_dtype("auto", parameters(tmp_path, torch.bfloat16), "cpu").name == "float32"
