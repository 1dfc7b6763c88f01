"""What a user gets wrong ends in one line on standard error and exit code 2, before any work."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.samples import Cli


def test_the_version_is_that_of_the_package() -> None:
    done = subprocess.run([sys.executable, "-m", "mars_ray", "--version"], capture_output=True, text=True)
    assert done.stdout.split() == ["mars-ray", version("mars-ray")]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": "nowhere.jsonl"}, "There is no file"),
        ({"input": "pyproject.toml"}, "holds no file whose name ends with"),
        ({"model": "bundeld"}, "unknown model 'bundeld'"),
        ({"threshold": "1.5"}, "threshold is 1.5"),
        ({"max-tokens": "0"}, "max_tokens is 0"),
        ({"workers": "0"}, "workers is 0"),
        ({"rehearse": "h300/qwen2.5-7b"}, "h300/qwen2.5-7b"),
        ({"output": "mars_ray"}, "has files that do not belong to a job"),
    ],
)
def test_a_job_that_cannot_start_says_why_in_one_line(
    mars_ray: Cli, rows: Path, changes: dict[str, str], message: str
) -> None:
    given = {"input": rows, "output": rows.parent / "out"} | changes
    code, _, said = mars_ray("generate", *(word for name, value in given.items() for word in (f"--{name}", value)))
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
    assert not (rows.parent / "out").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --dry-run 1 --retry-errors", "--retry-errors has no effect with --dry-run"),
        ("generate --dry-run 0", "--dry-run is 0, must be at least 1"),
        ("generate --dry-run 1 --json", "--json has no effect with --dry-run"),
        ("generate --new --retry-errors", "give new or retry_errors, not both"),
        ("generate --template {{question}} --prompt-column question", "give template or prompt_column, not both"),
        ("demo --quantize int8", "--quantize has no effect without --model"),
        ("calibrate --results out --seeds 2", "give either --results, which are measured already, or --data"),
    ],
)
def test_options_that_would_have_no_effect_together_are_refused(
    mars_ray: Cli, rows: Path, command: str, message: str
) -> None:
    name, *words = command.split()
    job = ("--input", rows, "--output", rows.parent / "out") if name == "generate" else ()
    code, _, said = mars_ray(name, *job, *words)
    assert (code, said.count("\n")) == (2, 1)
    assert message in said


def test_a_misspelt_setting_of_a_training_run_is_named(mars_ray: Cli, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("modle: bundled\n")
    code, _, said = mars_ray("train", "--config", config)
    assert code == 2
    assert "modle is not a setting" in said
    assert said.count("\n") == 1


def test_a_misspelt_option_is_named(mars_ray: Cli) -> None:
    code, _, said = mars_ray("generate", "--inptu", "x")
    assert code == 2
    assert "--inptu" in said
