"""Run the tests of a task on code that a model wrote, in a sandbox.

In:    an answer, and a HumanEval task.
Out:   whether all tests passed.
Never: lets the code reach a network or other processes, write outside an empty folder in memory, read files other than
       Python and the system's libraries, or use more time and memory than the limits below.

The sandbox is bubblewrap (`bwrap`), which Flatpak also uses. If it is missing, no code is run.
"""

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mars_ray.errors import ConfigError, RunError

Program = dict[str, Any]
SECONDS_MAX = 10
"""Limit on CPU seconds. The limit on elapsed time is `CLOCK` times as long, because the machine may be busy."""
CLOCK = 3
MEMORY_MAX = 1 << 30
"""Memory limit in bytes for each of the two processes, judge and answer. Neither can start a further process, unless it
runs as root."""
FOLDER_BYTES_MAX = 16 << 20
PASSED = 77
"""Exit code of the judge process if the answer passes."""
LIMITS = {
    "RLIMIT_CPU": SECONDS_MAX,
    "RLIMIT_AS": MEMORY_MAX,
    "RLIMIT_FSIZE": FOLDER_BYTES_MAX,  # also limits memfd files, which are outside the folder
    "RLIMIT_NOFILE": 32,
    "RLIMIT_CORE": 0,
}

_CODE_BLOCK = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_STARTED = "the sandbox is up"
"""Text printed on standard error once the sandbox is up; any output before it is an error message of the sandbox."""
_PROGRAM = Path(__file__).with_name("sandboxed_program.py").read_text(encoding="utf-8")


def check_sandbox() -> None:
    """Raise `ConfigError` if the sandbox does not work on this machine."""
    try:
        _run(program_of("", "def check(candidate):\n    candidate()\n", "f", "def f():\n    pass\n"))
    except RunError as error:
        raise ConfigError(f"humaneval cannot be run here. {error} Or leave humaneval out.") from None


def passes_tests(reference: str, text: str) -> bool:
    """Run the tests in `reference` (JSON with prompt, test and entry_point) on the code in `text`; return True if all
    pass.

    Raises `RunError` if the sandbox does not start.
    """
    task = json.loads(reference)
    return _run(program_of(task["prompt"], task["test"], task["entry_point"], text)) == PASSED


def program_of(prompt: str, test: str, entry_point: str, text: str) -> Program:
    """Return the program for the sandbox: the answer's code, in pieces that form one module, and the tests.

    The code is the first code block in `text`, or all of `text` if it has none. Code that does not define the function
    is appended to the prompt. The tests run after the head of the prompt, which is the part above the function.
    """
    block = _CODE_BLOCK.search(text)
    code = block[1] if block else text
    head = prompt[: max(prompt.rfind(f"def {entry_point}"), 0)]
    defines = re.search(rf"^def {re.escape(entry_point)}\b", code, re.MULTILINE)
    # The answer may use the imports in the head. The answer is a separate piece, because it may begin with __future__
    # imports.
    answer = [head, code] if defines else [prompt + code]
    return {"answer": answer, "head": head, "test": test, "entry_point": entry_point}


@cache
def _without_namespaces(bwrap: str) -> tuple[str, ...]:
    """Return the option that forbids user namespaces in the sandbox, or nothing if it does not work on this machine.

    The option needs bubblewrap 0.8.0 and a writable /proc.
    """
    option = "--disable-userns"
    trial = [bwrap, "--unshare-user", option, "--ro-bind", "/", "/", "true"]
    return (option,) if subprocess.run(trial, capture_output=True, check=False).returncode == 0 else ()


def _run(program: Program) -> int | None:
    """Run a program in the sandbox, and return its exit code, or None after a timeout."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise RunError("bwrap, the sandbox for model-written code, is missing; install the package bubblewrap.")
    library = [
        part for path in (sys.base_prefix, "/usr/lib", "/lib", "/lib64") for part in ("--ro-bind-try", path, path)
    ]
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    command = [
        *(bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"),
        *_without_namespaces(bwrap),
        *("--cap-drop", "ALL"),  # otherwise root could remount read-only folders as writable
        *library,
        *("--size", str(FOLDER_BYTES_MAX), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"),
        *(str(python), "-I", "-c", _PROGRAM, json.dumps(LIMITS), str(PASSED), _STARTED),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, stderr = process.communicate(json.dumps(program).encode(), timeout=CLOCK * SECONDS_MAX)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()  # this ends all processes in the sandbox
            _, stderr = process.communicate()
            code = None
    if not stderr.endswith(_STARTED.encode()):
        reason = stderr.decode(errors="replace").strip() or f"exit code {code}"
        raise RunError(
            f"The sandbox for model-written code did not start: {reason}. It needs user namespaces and {python}."
        )
    return code
