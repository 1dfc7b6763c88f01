"""The threads of a step: they meet at barriers, and sleep between steps."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mars_ray.engine.kernels.library_file import FLAGS, SOURCE

PROGRAM = Path(__file__).with_name("team.cpp")


@pytest.mark.parametrize(
    "sanitizer",
    [
        pytest.param((), id="plain"),
        pytest.param(("-fsanitize=thread",), id="thread sanitizer", marks=pytest.mark.sanitizers),
    ],
)
def test_teams_of_changing_size_meet_at_every_barrier(tmp_path: Path, sanitizer: tuple[str, ...]) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "team"
    command = [compiler, *FLAGS, *sanitizer, f"-I{SOURCE.parent}", str(PROGRAM), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if sanitizer and "tsan" in done.stderr:
        pytest.skip("the compiler has no thread sanitizer")
    assert done.returncode == 0, done.stderr[-3000:]
    ran = subprocess.run([program], capture_output=True, text=True, check=False, timeout=280)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "right\n", "")
