"""Does code that a model wrote pass the tests of its task? Run in a sandbox, where it can do no harm.

In:    an answer, and the facts of a task of HumanEval.
Out:   whether all tests passed.
Never: gives that code a network, other processes, anything to write but an empty folder in memory, anything to read but
       Python and the system's libraries, or more time and memory than the limits below.

The sandbox is bubblewrap (`bwrap`), which Flatpak runs its applications in. Where it is missing nothing is run at all.
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
"""Seconds of a processor; by the clock `CLOCK` times as many, since others may use the machine too."""
CLOCK = 3
MEMORY_MAX = 1 << 30
"""Limits of each of two processes, the judge's and the answer's; neither can start another, but root's."""
FOLDER_BYTES_MAX = 16 << 20
PASSED = 77
"""Exit code of the process that judges; an answer runs in another one."""
LIMITS = {
    "RLIMIT_CPU": SECONDS_MAX,
    "RLIMIT_AS": MEMORY_MAX,
    "RLIMIT_FSIZE": FOLDER_BYTES_MAX,  # of files that are memory too: memfd is no part of the folder
    "RLIMIT_NOFILE": 32,
    "RLIMIT_CORE": 0,
}

_CODE_BLOCK = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_STARTED = "the sandbox is up"
"""What is said before is of the sandbox, and nothing that is said afterwards is kept."""
_PROGRAM = Path(__file__).with_name("sandboxed_program.py").read_text(encoding="utf-8")


def check_sandbox() -> None:
    """Raise `ConfigError` where code cannot be shut off."""
    try:
        _run(program_of("", "def check(candidate):\n    candidate()\n", "f", "def f():\n    pass\n"))
    except RunError as error:
        raise ConfigError(f"humaneval cannot be run here. {error} Or leave humaneval out.") from None


def passes_tests(reference: str, text: str) -> bool:
    """Run the tests in `reference` (prompt, test, entry_point as JSON) on the code in `text`.

    Raises `RunError` where the sandbox does not start.
    """
    facts = json.loads(reference)
    return _run(program_of(facts["prompt"], facts["test"], facts["entry_point"], text)) == PASSED


def program_of(prompt: str, test: str, entry_point: str, text: str) -> Program:
    """Return the code of an answer, in pieces to be run in one module, and the tests with what stands above them.

    The first code block counts, else the whole text. Code that does not define the function continues the prompt.
    """
    block = _CODE_BLOCK.search(text)
    code = block[1] if block else text
    head = prompt[: max(prompt.rfind(f"def {entry_point}"), 0)]
    defines = re.search(rf"^def {re.escape(entry_point)}\b", code, re.MULTILINE)
    # What stands above the function, such as imports, is there for the answer too, which may begin with a __future__.
    answer = [head, code] if defines else [prompt + code]
    return {"answer": answer, "head": head, "test": test, "entry_point": entry_point}


@cache
def _without_namespaces(bwrap: str) -> tuple[str, ...]:
    """Return the option that keeps the program from making user namespaces, where it can be had.

    Bubblewrap has it from 0.8.0, and it needs a /proc that can be written to.
    """
    option = "--disable-userns"
    trial = [bwrap, "--unshare-user", option, "--ro-bind", "/", "/", "true"]
    return (option,) if subprocess.run(trial, capture_output=True, check=False).returncode == 0 else ()


def _run(program: Program) -> int | None:
    """Return the exit code; None when time is up."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise RunError("There is no bwrap to run code of a model in; install the package bubblewrap.")
    library = [
        part for path in (sys.base_prefix, "/usr/lib", "/lib", "/lib64") for part in ("--ro-bind-try", path, path)
    ]
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    command = [
        *(bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"),
        *_without_namespaces(bwrap),
        *("--cap-drop", "ALL"),  # root's would mount what is read-only a second time, to write to it
        *library,
        *("--size", str(FOLDER_BYTES_MAX), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"),
        *(str(python), "-I", "-c", _PROGRAM, json.dumps(LIMITS), str(PASSED), _STARTED),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, said = process.communicate(json.dumps(program).encode(), timeout=CLOCK * SECONDS_MAX)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()  # and with bwrap everything in it
            _, said = process.communicate()
            code = None
    if not said.endswith(_STARTED.encode()):
        reason = said.decode(errors="replace").strip() or f"exit code {code}"
        raise RunError(
            f"The sandbox for code of a model did not start: {reason}. It needs user namespaces and {python}."
        )
    return code
