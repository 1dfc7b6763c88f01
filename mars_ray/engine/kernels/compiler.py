"""Compile the kernels of this folder for one family of processors.

The build of the wheel uses this file, so it imports only the standard library.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mars_ray.engine.kernels.families import KernelError, KernelFamily

MACOS = sys.platform == "darwin"
SUFFIX = ".dylib" if MACOS else ".so"
FLAGS: tuple[str, ...] = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-w"),
    *("-ffp-contract=fast", "-fno-strict-aliasing"),
    *(("-mmacosx-version-min=11.0",) if MACOS else ()),
)
"""Compiler flags. No fast-math, which would reorder sums; products are fused with sums, as GCC does by default. Words
may be read from memory of floats. No warnings, because GCC 12 warns about its own headers. macOS 11 is the first on
Apple silicon."""
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
SOURCE = Path(__file__).with_name("decoder.cpp")


def find_compiler() -> str:
    """Return the command of the C++ compiler: `CXX`, or else `c++` or `g++`. Raises `KernelError` without one."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise KernelError("there is no C++ compiler. Install g++, or a wheel of mars-ray with kernels.")
    return compiler


def compile_kernels(compiler: str, family: KernelFamily, library: Path) -> None:
    """Compile the kernels of a family into the file `library`, which appears whole.

    Raises `KernelError` with the reason if the compiler cannot, and `OSError` if the file cannot be written.
    """
    with TemporaryDirectory(dir=library.parent) as folder:
        whole = Path(folder) / f"whole{SUFFIX}"
        kind = "-dynamiclib" if MACOS else "-shared"
        _run(compiler, *FLAGS, *family.flags, kind, str(SOURCE), "-o", str(whole))
        whole.chmod(0o700)  # regardless of the umask
        whole.replace(library)


def _run(compiler: str, *arguments: str) -> None:
    try:
        done = subprocess.run([*shlex.split(compiler), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelError(f"{compiler} cannot be run: {error.strerror}.") from None
    if done.returncode:
        output = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        reason = next((line for line in output if "error" in line), output[-1])
        raise KernelError(f"{compiler} cannot compile the kernels: {reason}")
