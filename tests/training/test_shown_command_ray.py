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


def lettered(model: str) -> int:
    """How many of the held-out lists of the sample the model gives letters, and no other marks."""
    lines = (ROOT / "pipelines/sample/heldout.jsonl").read_text().splitlines()
    turns = [[each["content"] for each in json.loads(line)["messages"]] for line in lines]
    lists = [(question, answer) for question, answer in turns if answer.startswith("a) ")]
    assert len(lists) == 50
    answers = LLM(model).chat([question for question, _ in lists], SamplingParams(max_tokens=128))
    return sum(marks(each.text) == marks(right) for each, (_, right) in zip(answers, lists, strict=True))


def marks(text: str) -> list[str]:
    """What the lines begin with."""
    return [line.split(" ")[0] for line in text.splitlines()]


def test_the_command_that_readme_shows_teaches_the_bundled_model_what_the_sample_holds(tmp_path: Path) -> None:
    [shown] = re.findall(r"^mars-ray train .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")  # its paths are a checkout's; it writes beside them
    command = ["python", "-m", "mars_ray", *shlex.split(shown, comments=True)[1:], "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"train: .* left", done.stderr)
    model = tmp_path / json.loads(done.stdout.splitlines()[-1])["model"]
    assert lettered(str(model)) > lettered("bundled") + 5
