"""A training step on CUDA mixes no devices and waits for the device once, shown without a GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_ray.method import tiles

pytestmark = pytest.mark.slow  # compiling the fake GPU takes ten seconds

SOURCE = Path(__file__).with_name("fake_gpu.cpp")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of `fake_steps`, in a process whose torch believes in a GPU."""
    compiler = shutil.which("g++")
    if compiler is None or torch.backends.cuda.is_built():
        pytest.skip("the fake GPU needs g++, and a build of torch without CUDA")
    library = tmp_path_factory.mktemp("gpu") / "fake_gpu.so"
    home = Path(torch.__file__).parent
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", str(SOURCE), "-o", str(library)]
    subprocess.run(
        [*command, f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"], check=True, capture_output=True, timeout=200
    )
    environment = os.environ | {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(home / "lib")}
    steps = subprocess.run(
        [sys.executable, "-m", "tests.training.fake_steps"], env=environment, check=True, stdout=subprocess.PIPE
    )
    return [json.loads(line) for line in steps.stdout.splitlines()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["adapter", "whole model"])
def test_a_step_reads_four_figures_at_its_end_and_waits_for_nothing_else(
    lines: list[dict[str, Any]], kind: str, dtype: torch.dtype
) -> None:
    same = {"kind": kind, "dtype": str(dtype), "attention": "sdpa"}
    assert same | {"read": [["cuda", 4]] * 2, "moments_on": ["cuda"], "untrained": 0} in lines


def test_tiles_would_wait_for_the_device(lines: list[dict[str, Any]]) -> None:
    in_tiles = [line for line in lines if line["attention"] == tiles.ATTENTION]
    assert len(in_tiles) == 4
    assert all("waits" in line for line in in_tiles)
