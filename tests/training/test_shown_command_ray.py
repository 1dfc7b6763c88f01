"""The training command that README shows, run as it stands."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mars_ray import LLM, SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


def marks(text: str) -> list[str]:
    """What the lines begin with."""
    return [line.split(" ")[0] for line in text.splitlines()]


def test_the_command_that_readme_shows_teaches_the_bundled_model_what_the_sample_holds(tmp_path: Path) -> None:
    [shown] = re.findall(r"^mars-ray train .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    (tmp_path / "pipelines").symlink_to(
        ROOT / "pipelines"
    )  # its paths are those of a checkout; the run is written here
    command = ["python", "-m", "mars_ray", *shlex.split(shown, comments=True)[1:], "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"train: .* left", done.stderr)
    turns = [json.loads(line)["messages"] for line in (ROOT / "pipelines/sample/heldout.jsonl").open()]
    asked, right = zip(*[(question["content"], answer["content"]) for question, answer in turns], strict=True)
    answers = LLM(str(Path(tmp_path / json.loads(done.stdout.splitlines()[-1])["model"]))).chat(
        asked, SamplingParams(max_tokens=128)
    )
    lists = [
        (marks(answer.text), marks(wanted)) for answer, wanted in zip(answers, right, strict=True) if "a) " in wanted
    ]
    assert len(lists) == 50
    assert sum(given == wanted for given, wanted in lists) >= 45
