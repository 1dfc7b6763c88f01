"""Does code that a model wrote pass the tests of its task? Run in a process that can do no harm.

In:    an answer, and the facts of a task of HumanEval.
Out:   whether all tests passed.
Never: gives that code a network, other processes, files beyond an empty folder, or more time and memory than `LIMITS`.

Namespaces of Linux (`unshare`) take network, processes and shared memory away, Landlock takes the files: what is not
listed can be neither read nor written. Where one of them is missing nothing is run at all.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

from mars_ray.errors import ConfigError

SECONDS_MAX = 10
"""Of a processor, and by the clock."""
MEMORY_MAX = 1 << 30
FILE_BYTES_MAX = 1 << 20
PASSED = 77
"""Exit code that only the end of the program gives: code that calls `exit()` before its tests has not passed."""

_UNSHARE = ("--user", "--map-root-user", "--net", "--pid", "--ipc", "--fork", "--kill-child")
_CODE_BLOCK = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

# Numbers of the system calls are the same on x86-64 and arm64; rights are those of the first version of Landlock:
# 1 execute, 2 write, 4 read a file, 8 list a folder, and up to 1 << 12 ways to make and remove entries.
_LAUNCHER = f"""
import ctypes, os, resource, sys
program, readable = sys.stdin.read(), sys.argv[1:]
for what, most in ((resource.RLIMIT_CPU, {SECONDS_MAX}), (resource.RLIMIT_AS, {MEMORY_MAX}),
                   (resource.RLIMIT_FSIZE, {FILE_BYTES_MAX}), (resource.RLIMIT_NOFILE, 64),
                   (resource.RLIMIT_NPROC, 64), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (most, most))
system = ctypes.CDLL(None, use_errno=True).syscall
def call(*arguments):
    if (result := system(*arguments)) < 0:
        sys.exit("Landlock: " + os.strerror(ctypes.get_errno()))
    return result
class Ruleset(ctypes.Structure):
    _fields_ = [("handled", ctypes.c_uint64)]
class Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]
everything = (1 << 13) - 1
rules = call(444, ctypes.byref(Ruleset(everything)), ctypes.c_size_t(8), 0)
for path, allowed in [(".", everything), *((path, 13) for path in readable)]:
    folder = os.open(path, os.O_PATH)
    call(445, rules, 1, ctypes.byref(Beneath(allowed, folder)), 0)
    os.close(folder)
if ctypes.CDLL(None).prctl(38, 1, 0, 0, 0):
    sys.exit("no_new_privs is refused")
call(446, rules, 0)
os.close(rules)
exec(compile(program, "<answer>", "exec"), {{"__name__": "__main__"}})
os._exit({PASSED})
"""


def check_sandbox() -> None:
    """Raise `ConfigError` where code cannot be shut off."""
    code, said = _run("pass")
    if code != PASSED:
        raise ConfigError(
            "humaneval cannot be run here: code of the model must be shut off with user namespaces (unshare of "
            f"util-linux) and Landlock, which this system refuses{': ' if said else ''}{said}. Leave humaneval out."
        )


def passes(reference: str, text: str) -> bool:
    """Run the tests in `reference` (prompt, test, entry_point as JSON) on the code in `text`."""
    facts = json.loads(reference)
    return _run(program_of(facts["prompt"], facts["test"], facts["entry_point"], text))[0] == PASSED


def program_of(prompt: str, test: str, entry_point: str, text: str) -> str:
    """Return the code of an answer with the tests behind it.

    The first code block counts, else the whole text. Code that does not define the function continues the prompt.
    """
    block = _CODE_BLOCK.search(text)
    code = block[1] if block else text
    defines = re.search(rf"^def {re.escape(entry_point)}\b", code, re.MULTILINE)
    # What stands above the function, such as imports, is there for the answer too.
    above = prompt[: prompt.rindex(f"def {entry_point}")] if defines else prompt
    return f"{above}{code}\n\n{test}\n\ncheck({entry_point})\n"


def _run(program: str) -> tuple[int, str]:
    """Return the exit code and, where the launcher refused, why."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return 1, "there is no unshare"
    stdlib = {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")}
    readable = [path for path in (*sorted(stdlib), "/usr/lib", "/lib", "/lib64") if Path(path).is_dir()]
    command = [unshare, *_UNSHARE, sys.executable, "-I", "-c", _LAUNCHER, *readable]
    with (
        TemporaryDirectory(prefix="mars-ray-code-") as folder,
        subprocess.Popen(
            command,
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if program == "pass" else subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):
        try:
            _, said = process.communicate(program.encode(errors="replace"), timeout=SECONDS_MAX)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            # With `unshare` the first process of the namespace dies, and with that one all others in it.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    lines = (said or b"").decode(errors="replace").strip().splitlines()
    return process.returncode, lines[-1] if lines else ""
