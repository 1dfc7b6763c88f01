"""Races of a real model."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

from mars_ray.demo.race import RacePrompt, Track
from tests.samples import Cli

ASSETS = Path(str(files("mars_ray"))) / "assets"
PROMPT = json.loads((ASSETS / "prompts.jsonl").read_text().splitlines()[0])["prompt"]


def test_settings_answer_alone_and_exact_says_the_same() -> None:
    with Track("bundled", None, max_tokens=48, rounds=1) as track:
        race = track.race(RacePrompt("structure", PROMPT))
    ar, exact, ahead = race.lanes
    assert [lane.setting for lane in race.lanes] == ["ar", "exact", "threshold 0.9"]
    assert exact.text == ar.text
    assert ar.forwards == ar.tokens
    assert max(exact.forwards, ahead.forwards) <= ar.forwards  # equal where a busy machine is faster without masks
    for lane in race.lanes:
        times = [chunk.at_s for chunk in lane.chunks]
        assert times == sorted(times)
        assert lane.seconds == times[-1]
        assert lane.tokens == sum(chunk.tokens for chunk in lane.chunks)
    assert track.label.startswith("bundled, float32, ")


def test_a_model_that_does_not_look_ahead_races_in_exact_mode_with_drafts_from_text(tmp_path: Path) -> None:
    shutil.copytree(ASSETS / "bundled", tmp_path / "plain", ignore=shutil.ignore_patterns("mars.json"))
    with Track(str(tmp_path / "plain"), None, quantize="int8", max_tokens=24, rounds=1) as track:
        race = track.race(RacePrompt("structure", PROMPT))
    assert [lane.setting for lane in race.lanes] == ["ar", "exact"]
    assert race.lanes[0].text == race.lanes[1].text
    assert track.label.startswith("plain, int8, ")


def test_the_demo_races_a_model_that_is_named(mars_ray: Cli) -> None:
    code, out, _ = mars_ray("demo", "--model", "bundled", "--json")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert [race["prompt"]["workload"] for race in found["races"]] == ["general", "reasoning steps", "structure"]
    assert "general: How do plants make their food?" in out


def test_a_demo_of_what_is_no_model_ends_in_one_line(mars_ray: Cli) -> None:
    code, _, said = mars_ray("demo", "--model", "bundeld")
    assert (code, said.count("\n")) == (2, 1)
    assert "unknown model 'bundeld'" in said
