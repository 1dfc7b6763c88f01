"""Compile the kernels of this folder for the processor of this machine, once, and load them.

This needs a C++ compiler and AVX-512; without either, the engine runs the network through torch. The library is kept in
the user's cache folder under a digest of its sources and the processor.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mars_ray.errors import ModelError, OutputError
from mars_ray.storage.private import is_private, private_folder

CACHE = Path(".cache/mars-ray/kernels")
"""Folder of compiled kernels in the user's home. Its files are executed, so no other account may write there."""
FLAGS: tuple[str, ...] = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-w")
"""Compiler flags. No fast-math, which would reorder sums; no warnings, because GCC 12 warns about its own headers."""
NEEDED = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni"})
"""Required processor features, by their names in /proc/cpuinfo."""


class KernelError(ModelError):
    """The kernels cannot run on this machine, or do not support the network."""


@cache
def kernel_library() -> ctypes.CDLL:
    """Return the compiled kernels. Raises `KernelError` with the reason if they cannot be compiled or run."""
    processor = _processor()
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise KernelError("there is no C++ compiler; install g++.")
    sources = sorted(Path(__file__).parent.glob("*.h")) + sorted(Path(__file__).parent.glob("*.cpp"))
    digest = hashlib.sha256(f"{processor} {compiler} {FLAGS}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    try:
        folder = private_folder(Path.home() / CACHE, within=Path.home() / CACHE.parent)
    except OutputError as error:
        raise KernelError(str(error)) from None
    library = folder / f"{digest.hexdigest()[:24]}.so"
    if not is_private(library):
        _compile(compiler, sources, library)
    _load_openmp()
    return ctypes.CDLL(str(library))


def _processor() -> str:
    """Return the features of the processor, which the compiled code depends on. Raises `KernelError`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        raise KernelError("/proc/cpuinfo cannot be read; the kernels run on Linux only.") from None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    missing = NEEDED - set(flags)
    if missing:
        raise KernelError(f"the processor lacks {', '.join(sorted(missing))}.")
    return " ".join(sorted(flags))


def _compile(compiler: str, sources: list[Path], library: Path) -> None:
    with TemporaryDirectory(dir=library.parent) as folder:
        parts = Path(folder) / "part.o"
        whole = Path(folder) / "whole.so"
        (source,) = (source for source in sources if source.suffix == ".cpp")
        # Do not link OpenMP: the kernels share torch's copy, because two thread pools would compete for the cores.
        for command in ([*FLAGS, "-fopenmp", "-c", str(source), "-o", str(parts)], ["-shared", parts, "-o", whole]):
            try:
                done = subprocess.run([compiler, *command], capture_output=True, text=True, check=False)
            except OSError as error:
                raise KernelError(f"{compiler} cannot be run: {error.strerror}.") from None
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                raise KernelError(f"{compiler} cannot compile the kernels: {reason}")
        whole.chmod(0o700)  # regardless of the umask
        whole.replace(library)


def _load_openmp() -> None:
    """Make the symbols of the OpenMP library that torch has loaded available to the kernels."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = next((line.split(maxsplit=5)[5] for line in lines if "libgomp" in line), "libgomp.so.1")
    ctypes.CDLL(loaded, ctypes.RTLD_GLOBAL)
