"""Compile the kernels of this folder for one family of processors, and find and check the compiled files.

The name of a file holds a digest of the recipe and one of the content, so each can be checked.

The build of the wheel uses this file, so it imports only the standard library.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

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
    """Compile the kernels of a family into the file `library`.

    Raises `KernelError` with the reason if the compiler cannot, and `OSError` if the file cannot be written.
    """
    kind = "-dynamiclib" if MACOS else "-shared"
    command = [*shlex.split(compiler), *FLAGS, *family.flags, kind, str(SOURCE), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelError(f"{compiler} cannot be run: {error.strerror}.") from None
    if done.returncode:
        output = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        reason = next((line for line in output if "error" in line), output[-1])
        raise KernelError(f"{compiler} cannot compile the kernels: {reason}")
    library.chmod(0o700)  # regardless of the umask


BUILT = Path(__file__).with_name("built")
"""Folder of the kernels in an installed package. The build of the wheel fills it."""
DIGITS = 24
"""Hexadecimal digits of a digest in a name."""


def recipe_digest(family: KernelFamily, compiler: str = "") -> str:
    """Return a digest of sources, compiler flags and the compiler's command, which a wheel leaves out."""
    digest = hashlib.sha256(f"{compiler} {FLAGS} {family.flags}".encode())
    for source in (*HEADERS, SOURCE):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:DIGITS]


def library_name(family: KernelFamily, recipe: str, library: Path) -> str:
    """Return the file name for a compiled library."""
    return f"{family.name}-{recipe}-{_content_digest(library)}{SUFFIX}"


def find_libraries(folder: Path, family: KernelFamily, recipe: str = "*") -> list[Path]:
    """Return the libraries of a family in a folder, of one recipe or of all."""
    return sorted(folder.glob(f"{family.name}-{recipe}-*{SUFFIX}"))


def is_intact(library: Path) -> bool:
    """Return whether a library has the content that its name promises."""
    return library.stem.endswith(f"-{_content_digest(library)}")


def built_library(family: KernelFamily) -> Path:
    """Return the library of a family that came with the package.

    Raises `KernelError` if the package has none, or only one that was changed or made for another version.
    """
    for library in find_libraries(BUILT, family, recipe_digest(family)):
        if is_intact(library):
            return library
        raise KernelError(f"the kernels {library} were changed since they were built")
    if others := find_libraries(BUILT, family):
        raise KernelError(f"the kernels {others[0]} are of another version")
    raise KernelError(f"the installed package has no kernels for {family.name}")


def _content_digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:DIGITS]
