"""Run measurements one after the other, each in a process forked from one that has imported vLLM already.

Importing torch and vLLM took 20 seconds on the H200's machine, and vLLM would import both once more in a new process to
look at each architecture.
"""

import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from benchmarks.gpu.vllm_options import ENVIRONMENT

IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
    "mars_ray.vllm.runner.model_state",
    "mars_ray.vllm.runner.models",
)
POLL_S = 0.05


class Measurement(NamedTuple):
    """A module of this folder to run."""

    name: str
    limit_s: float
    module: str
    arguments: list[str]


def import_vllm() -> None:
    """Import what the engines need. A module that is missing is printed, and fails where it is needed."""
    os.environ.update(ENVIRONMENT)
    for name in IMPORTS:
        try:
            import_module(name)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return
    registry = sys.modules["vllm.model_executor.models.registry"]
    registry._run_in_subprocess = lambda work: work()  # type: ignore[attr-defined]


def run(measurement: Measurement, logs: Path) -> str:
    """Run a measurement with its output in `logs`; return the reason why it ended early, or nothing."""
    log = logs / f"{measurement.name}.log"
    end_s = time.monotonic() + measurement.limit_s
    child = os.fork()
    if child == 0:
        _become(measurement, log)
    status = None
    while status is None and time.monotonic() < end_s:
        waited, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if waited else None
        time.sleep(POLL_S)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"not done after {measurement.limit_s:.0f} s"
    errors = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return "" if status == 0 else (errors or [f"exit status {status}"])[-1]


def _become(measurement: Measurement, log: Path) -> NoReturn:
    """Run a measurement in this process, which gets a process group of its own."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.argv = [measurement.module, *measurement.arguments]
        import_module(f"benchmarks.gpu.{measurement.module}").main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
