"""`mars-ray demo`, as `make demo` runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mars_ray.ray_demo import read_rows


@pytest.mark.ray
def test_the_demo_is_faster_at_a_lower_threshold_and_as_accurate(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from mars_ray.cli import main; main()", "demo", "--json"]
    done = subprocess.run([*program, "--output", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, ahead = json.loads(done.stdout.splitlines()[-1])
    assert (whole["threshold"], ahead["threshold"]) == (1.0, 0.95)
    for each in (whole, ahead):
        assert (each["report"]["rows"], each["report"]["errors"]) == (240, 0)
        assert len(read_rows(tmp_path / f"threshold-{each['threshold']}")) == 240
    assert whole["report"]["tokens_per_forward"] == 1.0
    # How far a busy machine looks ahead is up to the engine.
    assert ahead["report"]["tokens_per_forward"] > 1.2
    assert ahead["accuracy"] >= whole["accuracy"] - 0.03
