"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mars_ray.engine.kernels.build import kernel_library
from mars_ray.engine.kernels.families import KernelError

pytestmark = pytest.mark.sanitizers


def sanitizers() -> str:
    """The libraries of the compiler's sanitizers, as LD_PRELOAD takes them."""
    try:
        kernel_library()
    except KernelError as reason:
        pytest.skip(f"no kernels here: {reason}")
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    asked = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if missing := [name for name in asked if not Path(name).is_absolute()]:
        pytest.skip(f"{compiler} has no {missing[0]}")
    return ":".join(asked)


def test_adapters_of_right_sizes_read_and_write_within_bounds_and_others_are_refused(tmp_path: Path) -> None:
    environment = os.environ | {
        "LD_PRELOAD": sanitizers(),
        # Python keeps what it has to its end; torch maps more than the sanitizer would let go.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "2",
    }
    child = [sys.executable, "-m", "tests.engine.sanitized_adapters"]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["clean"]), done.stderr[-6000:]
