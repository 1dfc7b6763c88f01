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
from pathlib import Path

from mars_ray.errors import ConfigError, RunError

SECONDS_MAX = 10
"""Seconds of a processor; by the clock `CLOCK` times as many, since others may use the machine too."""
CLOCK = 3
MEMORY_MAX = 1 << 30
"""Limits of each process; one that is not root's can start no second one."""
FOLDER_BYTES_MAX = 16 << 20
PASSED = 77
"""Exit code of a program that came to its end; code that calls `exit()` before its tests does not give it."""

_CODE_BLOCK = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_STARTED = b"the sandbox is up"
# What is said before the program begins is of the sandbox, and nothing that the program says is kept.
_LAUNCHER = f"""
import json, os, resource, sys, types
pieces = json.load(sys.stdin)
for what, most in ((resource.RLIMIT_CPU, {SECONDS_MAX}), (resource.RLIMIT_AS, {MEMORY_MAX}),
                   (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (most, most))
os.write(2, {_STARTED!r})
os.dup2(1, 2)
answer = sys.modules["answer"] = types.ModuleType("answer")
for piece in pieces:
    exec(compile(piece, "<answer>", "exec"), answer.__dict__)
os._exit({PASSED})
"""


def check_sandbox() -> None:
    """Raise `ConfigError` where code cannot be shut off."""
    try:
        _run(["pass"])
    except RunError as error:
        raise ConfigError(f"humaneval cannot be run here. {error} Or leave humaneval out.") from None


def passes(reference: str, text: str) -> bool:
    """Run the tests in `reference` (prompt, test, entry_point as JSON) on the code in `text`.

    Raises `RunError` where the sandbox does not start.
    """
    facts = json.loads(reference)
    return _run(program_of(facts["prompt"], facts["test"], facts["entry_point"], text)) == PASSED


def program_of(prompt: str, test: str, entry_point: str, text: str) -> list[str]:
    """Return the code of an answer with the tests behind it, in pieces to be run in one module one after the other.

    The first code block counts, else the whole text. Code that does not define the function continues the prompt.
    """
    block = _CODE_BLOCK.search(text)
    code = block[1] if block else text
    defines = re.search(rf"^def {re.escape(entry_point)}\b", code, re.MULTILINE)
    # What stands above the function, such as imports, is there for the answer too, which may begin with a __future__.
    answer = [prompt[: prompt.rindex(f"def {entry_point}")], code] if defines else [prompt + code]
    return [*answer, test, f"check({entry_point})"]


def _run(program: list[str]) -> int | None:
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
        *("--cap-drop", "ALL"),  # root's would mount what is read-only a second time, to write to it
        *library,
        *("--size", str(FOLDER_BYTES_MAX), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"),
        *(str(python), "-I", "-c", _LAUNCHER),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, said = process.communicate(json.dumps(program).encode(), timeout=CLOCK * SECONDS_MAX)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()  # and with bwrap everything in it
            _, said = process.communicate()
            code = None
    if not said.endswith(_STARTED):
        reason = said.decode(errors="replace").strip() or f"exit code {code}"
        raise RunError(
            f"The sandbox for code of a model did not start: {reason}. It needs user namespaces and {python}."
        )
    return code
