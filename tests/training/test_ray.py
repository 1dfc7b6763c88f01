"""Training through the real command on a real Ray cluster: killed, interrupted, and told the wrong thing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mars_ray.training.config import TrainConfig
from mars_ray.training.metrics import METRICS_FILE, follow_metrics, read_metrics
from mars_ray.training.run_folder import RunFolder
from tests.training.train_samples import MakeConfig

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


class Command:
    """`mars-ray train` in a process group of its own."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        path = folder / f"{config.output.name}.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self._metrics = follow_metrics(config.output)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from mars_ray.cli.main import main; main()",
                "train",
                "--config",
                str(path),
                "--json",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_step(self, step: int) -> None:
        """Return once a figure of that step or a later one was written."""
        while self.process.poll() is None:
            seen = next(self._metrics)
            if seen is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=0.02)
            elif seen.step >= step:
                return
        raise AssertionError(f"ended before step {step}: {self.process.communicate()[1]}")

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, standard output and standard error."""
        out, err = self.process.communicate()
        return self.process.returncode, out, err


def writer_of(path: Path) -> int:
    """Return the process that has `path` open: the worker of rank 0."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid() and path in _open_files(process):
            return int(process.name)
    raise AssertionError(f"nobody writes {path}")


def _open_files(process: Path) -> Iterator[Path]:
    try:
        yield from [link.readlink() for link in (process / "fd").iterdir()]
    except OSError:
        return


@pytest.mark.slow  # minutes of starting Ray; test_train_loop interrupts without it
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_however_it_is_interrupted_a_run_ends_with_the_same_weights(
    sharding: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Kill -9 of a worker, Ctrl-C, and kill -9 of the driver, all in one run of two workers."""
    long = {"learning_rate": 1e-3, "epochs": 12, "batch_rows": 4}
    compute = {"workers": 2, "sharding": sharding}
    whole = make_config("whole", optimizer=long, compute=compute, checkpoint_every=10)
    assert Command(whole, tmp_path).finish()[0] == 0
    steps = read_metrics(whole.output)[-1].steps
    settings = json.loads((whole.output / "settings.json").read_text())
    assert settings["compute"]["precision"] == "float32"  # what auto means for so small a model

    cut = make_config("cut", optimizer=long, compute=compute, checkpoint_every=10)
    command = Command(cut, tmp_path)
    command.wait_for_step(steps // 5)
    os.kill(writer_of(Path(str(cut.output / METRICS_FILE))), signal.SIGKILL)
    command.wait_for_step(steps // 5 + 12)  # the workers are back
    os.killpg(command.process.pid, signal.SIGINT)  # to the whole group, as a terminal does
    code, _, err = command.finish()
    assert code == 130
    assert "Run the same command to continue" in err

    command = Command(cut, tmp_path)
    command.wait_for_step(steps * 3 // 5)
    command.process.kill()
    command.finish()
    assert not RunFolder(cut.output).model.exists()

    code, out, _ = Command(cut, tmp_path).finish()
    assert code == 0
    assert json.loads(out.splitlines()[-1])["step"] == steps
    assert [each.step for each in read_metrics(cut.output)] == list(range(1, steps + 1))
    assert (cut.output / "metrics.png").stat().st_size > 10_000
    one, other = (load_file(RunFolder(config.output).model / "model.safetensors") for config in (whole, cut))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_what_cannot_be_trained_ends_with_one_line_that_says_why(make_config: MakeConfig, tmp_path: Path) -> None:
    empty, speechless = tmp_path / "empty.jsonl", tmp_path / "speechless.jsonl"
    empty.touch()
    speechless.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "who?"}\n')
    sections = make_config().model_dump(mode="json")["data"]
    cases = {
        "empty": ({"data": sections | {"heldout": str(empty)}}, 2, "empty.jsonl holds nothing to learn from"),
        "speechless": (
            {"data": sections | {"heldout": str(speechless)}},
            2,
            "1 x it has no 'response' or 'completion' to its 'prompt' (first: record 2)",
        ),
        "crowd": (
            {"compute": {"workers": 64}, "optimizer": {"learning_rate": 1, "epochs": 1, "batch_rows": 64}},
            2,
            "64 workers with 1 CPU each need 64",
        ),
        "nan": ({"optimizer": {"learning_rate": 1e30, "epochs": 2, "warmup": 0}}, 1, "Step 2 of"),
        "two": (
            {"optimizer": {"learning_rate": 1e30, "epochs": 2, "warmup": 0}, "compute": {"workers": 2}},
            1,
            "Step 2 of",
        ),
    }
    for name, (changes, expected, message) in cases.items():
        code, _, err = Command(make_config(name, **changes), tmp_path).finish()
        assert code == expected, err
        assert message in err
        assert "Traceback" not in err
