"""The kernels of the plug-in compile for GPUs. Triton's interpreter, in which the other tests run, accepts more."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)


def test_the_kernels_compile_for_an_a100_and_an_h100(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.vllm.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
