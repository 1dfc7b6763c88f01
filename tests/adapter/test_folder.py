"""An adapter on disk belongs to one base."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mars_ray.adapter import folder as folder_module
from mars_ray.adapter.card import (
    CONFIG_FILE,
    SHIPPED,
    is_adapter,
    read_adapter_card,
    resolve_adapter,
    shipped_adapters,
)
from mars_ray.adapter.folder import WEIGHTS_FILE, load_adapter, save_adapter
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.errors import AdapterError, OutputError
from mars_ray.model.card import CARD_FILE
from mars_ray.model.resolve import resolve_model
from tests.factories.cards import adapter_card

Adapted = tuple[PreTrainedModel, GatedLoRA]


@pytest.fixture
def base(network: PreTrainedModel, tmp_path: Path) -> Path:
    network.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def saved(adapted: Adapted, base: Path, tmp_path: Path) -> Path:
    card = adapter_card(base, base_model="tiny", block=3, objective={"distill": 1.0}, losses={"mask": 1.5})
    save_adapter(adapted[1], card, tmp_path / "adapter", dtype=torch.float32)
    return tmp_path / "adapter"


def test_what_is_saved_is_what_is_loaded(adapted: Adapted, base: Path, saved: Path) -> None:
    loaded = load_adapter(saved, base).lora
    assert loaded.shape == adapted[1].shape
    assert torch.equal(loaded.mask_embedding_KH, adapted[1].mask_embedding_KH)
    for name, pair in adapted[1].factors.items():
        assert torch.equal(loaded.factors[name].a, pair.a)
        assert torch.equal(loaded.factors[name].b, pair.b)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert is_adapter(saved)
    assert not is_adapter(base)
    assert read_adapter_card(saved).losses == {"mask": 1.5}


def test_in_8_bits_every_number_is_off_by_half_a_step_at_most(
    adapted: Adapted, base: Path, saved: Path, tmp_path: Path
) -> None:
    with torch.no_grad():
        adapted[1].factors["model.layers.1.mlp.up_proj"].b[:, 1] = 0.0  # a scale of zero
    save_adapter(adapted[1], read_adapter_card(saved), tmp_path / "int8", dtype=torch.int8)
    loaded = load_adapter(tmp_path / "int8", base).lora
    for name, pair in adapted[1].factors.items():
        for factor, found in ((pair.a, loaded.factors[name].a), (pair.b, loaded.factors[name].b)):
            shorter = factor.shape.index(min(factor.shape))
            half_step = factor.abs().amax(dim=1 - shorter, keepdim=True) / 127 / 2
            assert ((found - factor).abs() <= half_step * 1.001).all()
    torch.testing.assert_close(loaded.mask_embedding_KH, adapted[1].mask_embedding_KH, rtol=2**-8, atol=0)
    kept = load_file(tmp_path / "int8" / WEIGHTS_FILE)
    matrices = [parameter for name, parameter in adapted[1].named_parameters() if "mask_embedding" not in name]
    numbers = sum(parameter.numel() for parameter in matrices if parameter.ndim == 2)
    assert sum(each.numel() for each in kept.values() if each.dtype is torch.int8) == numbers


def test_factors_in_8_bits_without_their_scales_are_not_complete(adapted: Adapted, base: Path, saved: Path) -> None:
    card = read_adapter_card(saved)
    save_adapter(adapted[1], card, saved, dtype=torch.int8, replace=True)
    kept = load_file(saved / WEIGHTS_FILE)
    name = next(name for name in kept if name.endswith("_scale"))
    for damaged in (kept | {name: kept[name][:1, 0]}, {key: each for key, each in kept.items() if key != name}):
        save_file(damaged, saved / WEIGHTS_FILE)
        with pytest.raises(AdapterError, match="not a complete adapter"):
            load_adapter(saved, base)


def test_the_configuration_speaks_as_peft_does(saved: Path) -> None:
    config = json.loads((saved / CONFIG_FILE).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["gated"]) == ("LORA", 3, 6.0, True)
    assert "q_proj" in config["target_modules"]


def test_a_base_with_other_tokens_is_refused(base: Path, saved: Path) -> None:
    shutil.copy(resolve_model("bundled") / "tokenizer.json", base)
    with pytest.raises(AdapterError, match=r"an adapter for tiny, and the model in .* has other tokens"):
        load_adapter(saved, base)


def test_a_base_with_other_weights_is_named_in_a_warning(
    network: PreTrainedModel, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad():
        network.lm_head.weight[0, 0] += 1
    network.save_pretrained(tmp_path / "other")
    with torch.no_grad():
        network.lm_head.weight[0, 0] -= 1
    load_adapter(saved, tmp_path / "other")
    assert "was trained on tiny with other weights" in caplog.text


@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE, CARD_FILE])
def test_what_is_missing_or_cut_is_an_error_that_names_it(base: Path, saved: Path, file: str) -> None:
    content = (saved / file).read_bytes()
    for damaged in (content[: len(content) // 2], b"{}", b""):
        (saved / file).write_bytes(damaged)
        with pytest.raises(AdapterError, match="adapter"):
            load_adapter(saved, base)
    (saved / file).unlink()
    with pytest.raises(AdapterError, match="adapter"):
        load_adapter(saved, base)


def test_an_adapter_that_is_not_gated_is_refused(base: Path, saved: Path) -> None:
    config = json.loads((saved / CONFIG_FILE).read_text())
    (saved / CONFIG_FILE).write_text(json.dumps(config | {"gated": False}))
    with pytest.raises(AdapterError, match="gated"):
        load_adapter(saved, base)


def test_an_older_adapter_is_replaced_only_when_that_is_asked_for(adapted: Adapted, base: Path, saved: Path) -> None:
    card = read_adapter_card(saved)
    with pytest.raises(OutputError, match="already in use"):
        save_adapter(adapted[1], card, saved)
    save_adapter(adapted[1], card.model_copy(update={"steps": 9}), saved, replace=True)
    assert read_adapter_card(saved).steps == 9


BASES = {"qwen2.5-coder-0.5b-instruct": "qwen2.5-coder-0.5b-instruct-q4", "smollm2": "smollm2"}
"""Models of the shipped adapters."""


def test_a_folder_with_other_files_keeps_its_adapter(adapted: Adapted, base: Path, saved: Path) -> None:
    card = load_adapter(saved, base).card
    (saved / "README.md").write_text("mine")
    with pytest.raises(OutputError, match=r"files other than an adapter, such as README\.md"):
        save_adapter(adapted[1], card, saved, replace=True)
    assert load_adapter(saved, base).card == card


def test_an_adapter_stays_if_the_new_one_cannot_be_written(
    adapted: Adapted, base: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = load_adapter(saved, base).card

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(folder_module, "save_file", full)
    with pytest.raises(OutputError, match="no space left"):
        save_adapter(adapted[1], card, saved, replace=True)
    assert load_adapter(saved, base).card == card


def test_a_shipped_adapter_is_found_by_the_name_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in shipped_adapters():
        folder = resolve_adapter(name)
        assert folder == SHIPPED / name
        assert read_adapter_card(folder).base_model == BASES[name]
        assert (folder / WEIGHTS_FILE).stat().st_size <= 12_000_000
    assert shipped_adapters() == sorted(BASES)


def test_a_folder_comes_before_a_shipped_adapter_of_its_name(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved.rename(tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    assert resolve_adapter("smollm2") == tmp_path / "smollm2"
    assert resolve_adapter(None) is None


def test_what_is_no_adapter_is_refused_with_what_there_is(base: Path) -> None:
    with pytest.raises(AdapterError, match=r"unknown adapter 'smolm2': give 'qwen.*', 'smollm2', a folder, its"):
        resolve_adapter("smolm2")
    with pytest.raises(AdapterError, match="is not an adapter"):
        resolve_adapter(str(base))
