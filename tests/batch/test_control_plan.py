"""The plan of a batch job: its floor is where calibration says that quality is lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mars_ray.adapter.decoding_model import open_decoding_model
from mars_ray.batch.run.engine_plan import batch_plan, plan_engines
from mars_ray.batch.run.options import WorkerOptions
from mars_ray.batch.run.processor_config import ProcessorConfig, plan_stage
from mars_ray.control.control_settings import FLOOR, ControlSettings
from mars_ray.control.policies.policy import bounds_of
from mars_ray.engine.mode import DEFAULT_THRESHOLD, Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import ConfigError
from mars_ray.model.card import Card, read_card, write_card
from tests.factories.cards import calibration_point, model_card
from tests.factories.jobs import ONE_WORKER, engines_of

RIGHT = {1.0: 0.9, 0.95: 0.9, 0.9: 0.895, 0.85: 0.88, 0.8: 0.86, 0.7: 0.8}
AGREED = {1.0: 1.0, 0.95: 0.999, 0.9: 0.99, 0.85: 0.975, 0.8: 0.96, 0.7: 0.9}


def calibrated(folder: Path, *, accuracy: bool) -> Path:
    points = tuple(
        calibration_point(threshold=threshold, agreement=AGREED[threshold], accuracy=right if accuracy else None)
        for threshold, right in RIGHT.items()
    )
    write_card(model_card(calibration=points), folder)
    return folder


def floor(folder: Path, loss: float | None, threshold: float = 0.95) -> float:
    plan = batch_plan(read_card(folder), threshold=threshold, deadline_s=7200, max_quality_loss=loss)
    return bounds_of(plan, [])["standard"].floor


def test_the_floor_is_the_lowest_calibrated_threshold_that_loses_no_more(tmp_path: Path) -> None:
    folder = calibrated(tmp_path, accuracy=True)
    assert [floor(folder, loss) for loss in (0.0, 0.01, 0.03, 0.05)] == [0.95, 0.9, 0.85, 0.8]


def test_where_no_answer_could_be_verified_agreement_counts(tmp_path: Path) -> None:
    folder = calibrated(tmp_path, accuracy=False)
    assert [floor(folder, loss) for loss in (0.0, 0.01, 0.03, 0.05)] == [0.95, 0.9, 0.85, 0.8]


def test_without_a_bound_the_usual_floor_holds(tmp_path: Path) -> None:
    assert floor(tmp_path, None) == FLOOR
    assert floor(calibrated(tmp_path, accuracy=True), None) == FLOOR


def test_no_floor_is_above_the_threshold_of_the_job(tmp_path: Path) -> None:
    assert floor(calibrated(tmp_path, accuracy=True), 0.2, threshold=0.5) == 0.5


def test_without_a_deadline_the_threshold_stays(tmp_path: Path) -> None:
    card = read_card(calibrated(tmp_path, accuracy=True))
    plan = batch_plan(card, threshold=0.97, deadline_s=None, max_quality_loss=0.01)
    assert (plan.settings.policy, plan.ceiling) == ("fixed", 0.97)


def test_a_job_of_minutes_comes_back_sooner_than_one_of_hours(tmp_path: Path) -> None:
    waits = [
        batch_plan(read_card(tmp_path), threshold=0.95, deadline_s=each, max_quality_loss=None).settings.recover_s
        for each in (60.0, 36000.0)
    ]
    assert waits[0] < 2 and waits[1] == ControlSettings().recover_s


@pytest.mark.parametrize(
    ("deadline_s", "loss", "message"),
    [
        (0.0, None, "deadline is 0.0 s, must be more than 0."),
        (float("nan"), None, "deadline is nan s"),
        (60.0, 1.5, r"max_quality_loss is 1.5, must be 0 to 1."),
        (None, float("nan"), r"max_quality_loss is nan"),
        (None, 0.01, r"max_quality_loss is 0.01, but .* has no calibration"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, deadline_s: float | None, loss: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        batch_plan(read_card(tmp_path), threshold=0.95, deadline_s=deadline_s, max_quality_loss=loss)


def planned(card: Card | None, deadline_s: float | None, loss: float | None, **decode: Any) -> float | None:
    """The threshold that a job sets; `card` replaces that of the bundled model."""
    model = replace(open_decoding_model("bundled", None), card=card)
    _, chosen = plan_engines(
        model, workers=ONE_WORKER, decode=DecodeParams(**decode), deadline_s=deadline_s, max_quality_loss=loss
    )
    return chosen.threshold


def test_a_limit_on_lost_quality_sets_the_threshold_unless_a_deadline_does(tmp_path: Path) -> None:
    card = read_card(calibrated(tmp_path, accuracy=True))
    assert planned(card, None, 0.01) == 0.9
    assert planned(card, 60.0, 0.01) is None
    assert planned(card, None, None) == DEFAULT_THRESHOLD
    assert planned(None, None, None, threshold=0.8) == 0.8


def test_a_stage_takes_the_lowest_threshold_that_a_limit_on_lost_quality_allows() -> None:
    _, rows = plan_stage(ProcessorConfig(model="bundled", max_quality_loss=0.01))
    assert rows.decode.threshold == 0.9  # by the card in the package


@pytest.mark.parametrize(
    ("deadline_s", "loss", "decode", "message"),
    [
        (60.0, None, {"mode": Mode.EXACT}, "mode is exact, in which no threshold applies, so deadline has no effect"),
        (None, 0.01, {"mode": Mode.AR}, "mode is ar, .* so max_quality_loss has no effect"),
        (None, 0.01, {"threshold": 0.97}, "without a deadline, max_quality_loss sets the threshold"),
        (60.0, 0.01, {"threshold": 0.8}, "threshold is 0.8, but max_quality_loss allows 0.9 and above"),
    ],
)
def test_limits_that_would_have_no_effect_are_refused(
    tmp_path: Path, deadline_s: float | None, loss: float | None, decode: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(read_card(calibrated(tmp_path, accuracy=True)), deadline_s, loss, **decode)


def test_a_deadline_is_refused_for_a_model_that_does_not_look_ahead() -> None:
    with pytest.raises(ConfigError, match="the model does not look ahead"):
        planned(None, 60.0, None)


def notice_for(machine: str | None) -> str:
    engines = engines_of(WorkerOptions(rehearse=machine))
    assert engines.spec(1).options.rehearse == machine
    return engines.workers.notice


def test_the_engines_of_a_job_rehearse_the_machine_of_its_options() -> None:
    assert notice_for("h200/qwen2.5-7b") == "modelled step time: h200/qwen2.5-7b/vllm"
    assert notice_for(None) == ""
    with pytest.raises(ConfigError, match=r"h300/qwen2\.5-7b"):
        notice_for("h300/qwen2.5-7b")
