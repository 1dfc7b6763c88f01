"""`mars-ray demo` compares and races the bundled model."""

import json
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from mars_ray.data.chat import ChatEncoder
from mars_ray.demo.race import MAX_TOKENS, Track, settings_at
from mars_ray.demo.ray_job import SettingPace, SettingResult, notes, raced_prompts, read_rows
from tests.factories.engine import bundled_checkpoint, engine_of, request, run


@pytest.mark.slow  # its measurements take most of a minute
@pytest.mark.ray
def test_the_demo_compares_three_settings_and_races_them(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "mars_ray", "demo", "--json"]
    done = subprocess.run([*program, "--output", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    demo = json.loads(done.stdout.splitlines()[-1])
    assert (demo["report"]["rows"], demo["report"]["errors"]) == (780, 0)
    ar, exact, ahead = demo["rows"]
    assert [result["setting"] for result in (ar, exact, ahead)] == ["ar", "exact", "threshold 0.95"]
    assert {result["rows"] for result in (ar, exact, ahead)} == {260}
    texts = {
        name: {row["question"]: row["text"] for row in read_rows(tmp_path / "out") if row["setting"] == name}
        for name in ("ar", "exact")
    }
    assert texts["exact"] == texts["ar"]
    assert ahead["accuracy"] >= ar["accuracy"] - 0.03
    for callers in ("1", "16"):
        assert (ar["speeds"][callers]["times_ar"], ar["speeds"][callers]["tokens_per_forward"]) == (1.0, 1.0)
    # How far a busy machine looks ahead is up to the engine.
    assert all(result["speeds"]["1"]["tokens_per_forward"] > 1.2 for result in (exact, ahead))
    assert [lane["setting"] for lane in demo["races"][0]["lanes"]] == ["ar", "exact", "threshold 0.95"]
    assert demo["races"][0]["prompt"]["question"] in done.stdout


def result(setting: str, times_ar: float) -> SettingResult:
    pace = SettingPace(tokens_per_s=100.0, times_ar=times_ar, tokens_per_forward=1.25)
    return SettingResult(setting=setting, rows=1, accuracy=1.0, speeds={16: pace})


def test_a_setting_that_gains_nothing_is_explained_and_no_other() -> None:
    [note] = notes([result("ar", 1.0), result("exact", 1.01), result("threshold 0.95", 1.4)])
    assert note.startswith("exact gains nothing with 16 at a time: it gives 1.25 tokens per forward")


def test_a_race_has_one_lane_for_each_setting() -> None:
    with Track("bundled", None, threshold=0.95, rounds=1) as track:
        ar, exact, ahead = track.race(raced_prompts()[0]).lanes
    assert [lane.setting for lane in (ar, exact, ahead)] == ["ar", "exact", "threshold 0.95"]
    assert ar.tokens == ar.forwards == exact.tokens
    assert ahead.tokens >= ahead.forwards


def test_raced_prompts_give_more_than_two_tokens_per_forward() -> None:
    prompts = raced_prompts()
    assert len({prompt.workload for prompt in prompts}) == 4
    checkpoint = bundled_checkpoint()
    encoder = ChatEncoder(checkpoint.tokenizer)
    # With a real clock, how far an engine looks ahead depends on what else runs here.
    engine = engine_of(checkpoint, {"clock": count().__next__}, max_num_seqs=1)
    decode = settings_at(0.95)[-1].decode
    asked = [
        request(n, encoder.prompt(prompt.messages), decode, max_tokens=MAX_TOKENS) for n, prompt in enumerate(prompts)
    ]
    outputs = run(engine, asked).values()
    forwards = sum(output.finished.forwards for output in outputs)
    assert sum(len(output.tokens) for output in outputs) > 2 * forwards
