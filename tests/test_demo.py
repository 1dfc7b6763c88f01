"""`mars-ray demo`, as `make demo` runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mars_ray.cli.ray_demo import DemoRow, DemoSpeed, answers_alone, notes, read_rows
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model


@pytest.mark.slow  # its measurements take most of a minute
@pytest.mark.ray
def test_the_demo_compares_three_settings_on_a_warm_engine(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "mars_ray", "demo", "--json"]
    done = subprocess.run([*program, "--output", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["report"]["rows"], found["report"]["errors"]) == (720, 0)
    ar, exact, ahead = found["rows"]
    assert [each["setting"] for each in (ar, exact, ahead)] == ["ar", "exact", "threshold 0.95"]
    assert {each["rows"] for each in (ar, exact, ahead)} == {240}
    texts = {
        name: {row["question"]: row["text"] for row in read_rows(tmp_path / "out") if row["setting"] == name}
        for name in ("ar", "exact")
    }
    assert texts["exact"] == texts["ar"]
    assert ahead["accuracy"] >= ar["accuracy"] - 0.03
    for callers in ("1", "16"):
        assert (ar["speeds"][callers]["times_ar"], ar["speeds"][callers]["tokens_per_forward"]) == (1.0, 1.0)
    # How far a busy machine looks ahead is up to the engine.
    assert all(each["speeds"]["1"]["tokens_per_forward"] > 1.2 for each in (exact, ahead))


def row(setting: str, times_ar: float) -> DemoRow:
    pace = DemoSpeed(tokens_per_s=100.0, times_ar=times_ar, tokens_per_forward=1.25)
    return DemoRow(setting=setting, rows=1, accuracy=1.0, speeds={16: pace})


def test_a_setting_that_gains_nothing_is_explained_and_no_other() -> None:
    [said] = notes([row("ar", 1.0), row("exact", 1.01), row("threshold 0.95", 1.4)])
    assert said.startswith("exact gains nothing with 16 at a time: it gives 1.25 tokens per forward")


def test_the_answers_shown_are_those_of_one_caller_and_look_ahead() -> None:
    prompts = (resolve_model("bundled").parent / "prompts.jsonl").read_text().splitlines()
    answers = answers_alone(load_checkpoint(resolve_model("bundled")), [json.loads(line) for line in prompts])
    assert sum(each.tokens for each in answers) > 2 * sum(each.forwards for each in answers)
