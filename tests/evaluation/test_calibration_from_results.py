"""The results of an evaluation as the calibration of the model or adapter that it was made with."""

import shutil
from pathlib import Path

import pytest

from mars_ray.errors import DataError
from mars_ray.evaluation.calibration_from_results import calibrate_from, calibration_of
from mars_ray.evaluation.results import RESULTS_FILE, Results, write_model
from mars_ray.model.card import CARD_FILE, read_card
from mars_ray.model.digest import folder_digest
from mars_ray.model.resolve import resolve_model
from tests.evaluation.evaluate_samples import figures, results
from tests.samples import Cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("bundled"), tmp_path / "model"))


def changed(finished: Results, **changes: object) -> Results:
    return finished.model_copy(update={"plan": finished.plan.model_copy(update=changes)})


def test_exact_mode_is_threshold_one_and_every_task_has_its_figures() -> None:
    first, second = calibration_of(results(tasks=("a", "b")))
    assert (first.threshold, first.tokens_per_forward, first.accuracy) == (1.0, 3.0, 0.9)
    assert (second.threshold, second.tokens_per_forward, second.accuracy, second.accuracy_std) == (0.9, 4.0, 0.88, 0.01)
    assert (second.examples, second.tokens, second.seeds) == (100, 1000, 2)
    assert second.data == "a, b, block 4"
    assert [(name, point.accuracy) for name, point in second.by_family.items()] == [("a", 0.88), ("b", 0.88)]


def test_what_exact_mode_gains_from_text_is_no_gain_of_masks() -> None:
    finished = results()
    with_text = finished.overall["exact"].model_copy(update={"tokens_per_forward": 5.0})
    tasks = {"a": finished.tasks["a"] | {"exact": with_text}}
    finished = finished.model_copy(update={"overall": finished.overall | {"exact": with_text}, "tasks": tasks})
    points = calibration_of(finished)
    assert [point.tokens_per_forward for point in points] == [4.0, 4.0]
    assert [family.tokens_per_forward for point in points for family in point.by_family.values()] == [4.0, 4.0]


def test_agreement_is_relative_to_that_of_exact_mode_which_rounded_weights_lower() -> None:
    finished = changed(results(), quantize="int8")
    exact = finished.overall["exact"].model_copy(update={"agreement": 0.98})
    lowered = finished.overall["threshold 0.9"].model_copy(update={"agreement": 0.931})
    finished = finished.model_copy(update={"overall": finished.overall | {"exact": exact, "threshold 0.9": lowered}})
    assert [point.agreement for point in calibration_of(finished)] == [1.0, pytest.approx(0.95)]
    assert calibration_of(finished)[0].data == "a in int8, block 4"


def test_an_evaluation_that_cannot_be_a_calibration_is_refused() -> None:
    unanswered = figures(0.9, 3.0).model_copy(update={"unanswered": 2})
    finished = results()
    for unfit, message in (
        (changed(finished, temperature=0.7), "at temperature 0.7; a calibration needs 0"),
        (finished.model_copy(update={"overall": {"ar": finished.overall["ar"]}}), "has no exact mode"),
        (finished.model_copy(update={"overall": finished.overall | {"exact": unanswered}}), "2 answers .* are missing"),
    ):
        with pytest.raises(DataError, match=message):
            calibration_of(unfit)


def test_the_command_replaces_the_calibration_of_the_evaluated_model(
    folder: Path, tmp_path: Path, mars_ray: Cli
) -> None:
    before = read_card(folder)
    assert before is not None
    write_model(tmp_path / RESULTS_FILE, changed(results(), model_digest=folder_digest(folder)))
    code, out, err = mars_ray("calibrate", "--model", folder, "--results", tmp_path)
    assert code == 0, err
    assert "threshold" in out
    after = read_card(folder)
    assert after is not None
    assert [point.threshold for point in after.calibration] == [1.0, 0.9]
    assert after.model_copy(update={"calibration": before.calibration}) == before


def test_an_evaluation_of_other_weights_or_none_at_all_leaves_the_card(folder: Path, tmp_path: Path) -> None:
    before = (folder / CARD_FILE).read_bytes()
    with pytest.raises(DataError, match="Name the output folder of a finished `mars-ray evaluate`"):
        calibrate_from(tmp_path, folder)
    write_model(tmp_path / RESULTS_FILE, results())
    with pytest.raises(DataError, match="is an evaluation of another model or adapter"):
        calibrate_from(tmp_path, folder)
    assert (folder / CARD_FILE).read_bytes() == before


def test_results_and_data_to_measure_exclude_each_other(folder: Path, tmp_path: Path, mars_ray: Cli) -> None:
    code, _, err = mars_ray("calibrate", "--model", folder, "--results", tmp_path, "--examples", 3)
    assert code == 2
    assert "give either --results" in err
