from pathlib import Path

import pytest

from mars_ray.adapter.card import resolve_adapter
from mars_ray.adapter.folder import save_adapter
from mars_ray.adapter.gated_lora import GatedLoRA, LoraShape
from mars_ray.batch.run.options import WorkerOptions
from mars_ray.errors import ConfigError
from mars_ray.evaluation.prepare import EvaluateOptions, prepare_evaluation
from mars_ray.model.digest import folder_digest
from mars_ray.model.resolve import resolve_model
from tests.factories.cards import adapter_card
from tests.model.hub_server import running_hub

COMMIT = "1" * 40


def test_the_model_of_an_evaluation_is_named_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub(tmp_path, monkeypatch) as hub:
        hub.add("someone/small-model", resolve_model("bundled"), COMMIT)
        prepared = prepare_evaluation(
            EvaluateOptions(tasks=("families",), model="someone/small-model", output=tmp_path / "out")
        )
    assert prepared.plan.model == prepared.options.model == f"someone/small-model@{COMMIT}"


def test_a_folder_is_named_by_its_last_part(tmp_path: Path) -> None:
    prepared = prepare_evaluation(
        EvaluateOptions(tasks=("families",), model=str(resolve_model("bundled")), output=tmp_path / "out")
    )
    assert prepared.plan.model == "bundled"


def test_the_adapter_of_an_evaluation_is_kept_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = GatedLoRA(LoraShape(rank=1, alpha=2.0, masks=2, linears={"model.layers.0.mlp.up_proj": (192, 512)}), 192)
    card = adapter_card(resolve_model("bundled"))
    save_adapter(lora, card, tmp_path / "adapter")
    with running_hub(tmp_path, monkeypatch) as hub:
        hub.add("someone/adapter", tmp_path / "adapter", COMMIT)
        prepared = prepare_evaluation(
            EvaluateOptions(tasks=("families",), adapter="someone/adapter", output=tmp_path / "out")
        )
    assert prepared.options.adapter == f"someone/adapter@{COMMIT}"
    assert prepared.decoding.adapter == resolve_adapter(prepared.options.adapter)
    assert prepared.plan.adapter_digest == folder_digest(tmp_path / "adapter")
    assert prepared.plan.block == 2


def test_thresholds_that_no_mode_uses_are_refused(tmp_path: Path) -> None:
    options = EvaluateOptions(tasks=("families",), output=tmp_path / "out", modes=("ar",), thresholds=(0.9,))
    with pytest.raises(ConfigError, match="thresholds are given, but modes has no threshold"):
        prepare_evaluation(options)


def test_an_evaluation_takes_no_modelled_step_times(tmp_path: Path) -> None:
    options = EvaluateOptions(
        tasks=("families",), output=tmp_path / "out", workers=WorkerOptions(rehearse="h200/qwen2.5-7b")
    )
    with pytest.raises(ConfigError, match=r"rehearse is 'h200/qwen2\.5-7b'; an evaluation measures this machine"):
        prepare_evaluation(options)
