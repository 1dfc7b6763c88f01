from pathlib import Path

import pytest

from mars_ray.evaluation.run.options import EvaluateOptions
from mars_ray.evaluation.run.prepare import prepare
from mars_ray.model.resolve import resolve_model
from tests.model.hub_server import running_hub

COMMIT = "1" * 40


def test_the_model_of_an_evaluation_is_named_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub(tmp_path, monkeypatch) as hub:
        hub.add("someone/small-model", resolve_model("bundled"), COMMIT)
        prepared = prepare(EvaluateOptions(tasks=("families",), model="someone/small-model", output=tmp_path / "out"))
    assert prepared.plan.model == prepared.options.model == f"someone/small-model@{COMMIT}"


def test_a_folder_is_named_by_its_last_part(tmp_path: Path) -> None:
    prepared = prepare(
        EvaluateOptions(tasks=("families",), model=str(resolve_model("bundled")), output=tmp_path / "out")
    )
    assert prepared.plan.model == "bundled"
