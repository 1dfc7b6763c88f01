"""Run the tests of a task on code that a model wrote, in a sandbox.

In:    an answer, and a task of HumanEval.
Out:   whether all tests passed.
Never: gives the code a network, other processes, anything to write but an empty folder in memory, anything to read but
       Python and the system's libraries, or more time and memory than the limits below.

The sandbox is bubblewrap (`bwrap`), which Flatpak uses. Without it, no code is run.
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
"""Limit of CPU seconds. The limit of elapsed time is `CLOCK` times as long, because others may use the machine."""
CLOCK = 3
MEMORY_MAX = 1 << 30
"""Bytes of each of the two processes, the judge's and the answer's. Neither can start another, except as root."""
FOLDER_BYTES_MAX = 16 << 20
PASSED = 77
"""Exit code of the judge's process for an answer that passes."""
LIMITS = {
    "RLIMIT_CPU": SECONDS_MAX,
    "RLIMIT_AS": MEMORY_MAX,
    "RLIMIT_FSIZE": FOLDER_BYTES_MAX,  # also limits memfd files, which are outside the folder
    "RLIMIT_NOFILE": 32,
    "RLIMIT_CORE": 0,
}

_CODE_BLOCK = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_STARTED = "the sandbox is up"
"""Printed on standard error once the sandbox is up; earlier output is its error message."""
_PROGRAM = Path(__file__).with_name("sandboxed_program.py").read_text(encoding="utf-8")


def check_sandbox() -> None:
    """Raise `ConfigError` if the sandbox does not work here."""
    try:
        _run(program_of("", "def check(candidate):\n    candidate()\n", "f", "def f():\n    pass\n"))
    except RunError as error:
        raise ConfigError(f"humaneval cannot be run here. {error} Or leave humaneval out.") from None


def passes_tests(reference: str, text: str) -> bool:
    """Run the tests in `reference` (prompt, test, entry_point as JSON) on the code in `text`.

    Raises `RunError` if the sandbox does not start.
    """
    task = json.loads(reference)
    return _run(program_of(task["prompt"], task["test"], task["entry_point"], text)) == PASSED


def program_of(prompt: str, test: str, entry_point: str, text: str) -> Program:
    """Return the code of an answer, in pieces for one module, and the tests with the head of the prompt.

    The code is the first code block, or the whole text. Code that does not define the function continues the prompt.
    """
    block = _CODE_BLOCK.search(text)
    code = block[1] if block else text
    head = prompt[: max(prompt.rfind(f"def {entry_point}"), 0)]
    defines = re.search(rf"^def {re.escape(entry_point)}\b", code, re.MULTILINE)
    # The answer can use the imports above the function, and is a separate piece because of __future__ imports.
    answer = [head, code] if defines else [prompt + code]
    return {"answer": answer, "head": head, "test": test, "entry_point": entry_point}


@cache
def _without_namespaces(bwrap: str) -> tuple[str, ...]:
    """Return the option that forbids user namespaces in the sandbox, if it works here.

    The option needs bubblewrap 0.8.0 and a writable /proc.
    """
    option = "--disable-userns"
    trial = [bwrap, "--unshare-user", option, "--ro-bind", "/", "/", "true"]
    return (option,) if subprocess.run(trial, capture_output=True, check=False).returncode == 0 else ()


def _run(program: Program) -> int | None:
    """Return the exit code, None after a timeout."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise RunError("bwrap, the sandbox for code of a model, is missing; install the package bubblewrap.")
    library = [
        part for path in (sys.base_prefix, "/usr/lib", "/lib", "/lib64") for part in ("--ro-bind-try", path, path)
    ]
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    command = [
        *(bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"),
        *_without_namespaces(bwrap),
        *("--cap-drop", "ALL"),  # root could remount read-only folders as writable
        *library,
        *("--size", str(FOLDER_BYTES_MAX), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"),
        *(str(python), "-I", "-c", _PROGRAM, json.dumps(LIMITS), str(PASSED), _STARTED),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, stderr = process.communicate(json.dumps(program).encode(), timeout=CLOCK * SECONDS_MAX)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()  # bwrap takes all of its processes with it
            _, stderr = process.communicate()
            code = None
    if not stderr.endswith(_STARTED.encode()):
        reason = stderr.decode(errors="replace").strip() or f"exit code {code}"
        raise RunError(
            f"The sandbox for code of a model did not start: {reason}. It needs user namespaces and {python}."
        )
    return code
