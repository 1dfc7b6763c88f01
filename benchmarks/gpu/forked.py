"""Run measurements one after the other, each in a process forked from one that has imported vLLM already.

    python -m benchmarks.gpu.forked --logs /tmp/logs < plan.txt

Each line of the plan is a limit in seconds, a name for the log, a module of this folder, and its arguments. On a lent
GPU, importing torch and vLLM takes 20 seconds, and vLLM imports them once more to look at each architecture.
"""

import argparse
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu.vllm_options import ENVIRONMENT

IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.flash_attn",
    "mars_ray.vllm.runner.model_state",
    "mars_ray.vllm.runner.models",
    "benchmarks.gpu.vllm_steps",
    "benchmarks.gpu.vllm_answers",
)


def import_all() -> None:
    """Import what the measurements need; a module that is missing fails in the measurement that needs it."""
    os.environ.update(ENVIRONMENT)
    for name in IMPORTS:
        try:
            __import__(name)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    registry = sys.modules.get("vllm.model_executor.models.registry")
    if registry is not None:  # it would ask a new process, which keeps CUDA out of this one
        registry._run_in_subprocess = lambda work: work()  # type: ignore[attr-defined]


def run(line: str, logs: Path) -> None:
    """Run one line of the plan, and print how it ended and the figures in its log."""
    limit_s, name, module, *arguments = shlex.split(line)
    log = logs / f"{name}.log"
    begun_s = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(module, arguments, log)
    status = None
    while status is None and time.monotonic() < begun_s + float(limit_s):
        waited, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if waited else None
        time.sleep(0.05)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    ended = f"exit {status}" if status is not None else f"killed after {limit_s} s"
    print(f"== {name}: {ended}, {time.monotonic() - begun_s:.0f} s")
    lines = log.read_text(errors="replace").splitlines()
    for text in [text for text in lines if text.startswith("{")] + [text for text in lines if "Error" in text][-3:]:
        print(text[:300])
    sys.stdout.flush()


def _become(module: str, arguments: list[str], log: Path) -> None:
    """Run a module in this process, which is a child with a process group of its own, and end the process."""
    code = 1
    try:
        os.setpgid(0, 0)
        import torch

        if torch.cuda.is_initialized():  # an import used the GPU, which no forked process can use then
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments])
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.argv = [module, *arguments]
        imported = __import__(f"benchmarks.gpu.{module}", fromlist=["main"])
        imported.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Run the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    begun_s = time.monotonic()
    import_all()
    print(f"imports: {time.monotonic() - begun_s:.0f} s", flush=True)
    lines: Iterable[str] = sys.stdin
    for line in lines:
        if line.strip():
            run(line, arguments.logs)


if __name__ == "__main__":
    main()
