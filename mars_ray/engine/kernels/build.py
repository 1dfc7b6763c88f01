"""Load the kernels for this processor: built into the package, kept from an earlier start, or compiled now.

Compiled kernels are kept in the user's cache folder. Without built kernels and without a C++ compiler, the engine runs
the network through torch.
"""

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mars_ray.engine.kernels.families import VARIABLE, KernelError, KernelFamily, chosen_family, supported_families
from mars_ray.engine.kernels.library_file import (
    SUFFIX,
    built_library,
    compile_kernels,
    find_compiler,
    find_libraries,
    is_intact,
    library_name,
    recipe_digest,
)
from mars_ray.errors import OutputError
from mars_ray.storage.private import is_private, private_folder

CACHE = Path(".cache/mars-ray/kernels")
"""Folder of compiled kernels in the user's home. Its files are executed, so no other account may write there."""


class WeightLayout(ctypes.Structure):
    """The struct `WeightLayout` of `matrix.h`: the layout of packed weights."""

    _fields_ = (("columns", ctypes.c_int64), ("pairs", ctypes.c_int64), ("byte_offset", ctypes.c_int64))


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """The loaded kernels of a family."""

    family: KernelFamily
    origin: str
    """Origin of the file, for the log: built in, or compiled and why."""
    library: ctypes.CDLL
    layout: WeightLayout


def kernel_library() -> KernelLibrary:
    """Return the kernels of the chosen family, whose features the processor has at this moment.

    If the best family cannot be loaded and `MARS_RAY_KERNELS` names none, the best built one is used.

    Raises `KernelError` with the reason if there are no kernels to run, and `ConfigError` for a wrong
    `MARS_RAY_KERNELS`.
    """
    family = chosen_family()
    try:
        return load_family(family)
    except KernelError as error:
        if os.environ.get(VARIABLE):
            raise
        for other in supported_families():
            with suppress(KernelError):
                return replace(load_built(other), origin=f"built in, because {str(error).rstrip('.')}")
        raise


@cache
def load_family(family: KernelFamily) -> KernelLibrary:
    """Return the kernels of a family that the processor supports. Raises `KernelError` with the reason."""
    try:
        return load_built(family)
    except KernelError as error:
        reason = error
    try:
        return _compiled_library(family, f"compiled on this machine, because {reason}")
    except KernelError as error:
        raise KernelError(f"{reason}, and {error}") from None


@cache
def load_built(family: KernelFamily) -> KernelLibrary:
    """Return the kernels of a family that came with the package. Raises `KernelError` with the reason."""
    return _opened(family, built_library(family), "built in")


def _compiled_library(family: KernelFamily, origin: str) -> KernelLibrary:
    """Return kernels of the cache folder. Compile them if none there is private, intact and fit for this system."""
    compiler = find_compiler()
    recipe = recipe_digest(family, compiler)
    try:
        home = Path.home()
    except RuntimeError:
        raise KernelError("the home of this account is unknown, so kernels have no folder. Set HOME.") from None
    try:
        folder = private_folder(home / CACHE, within=home / CACHE.parent)
        for library in find_libraries(folder, family, recipe):
            if not (is_private(library) and is_intact(library)):
                library.unlink(missing_ok=True)
                continue
            with suppress(KernelError):  # machines that share a home may differ in their system libraries
                return _opened(family, library, origin)
        with TemporaryDirectory(dir=folder) as scratch:
            library = Path(scratch) / f"{family.name}{SUFFIX}"
            compile_kernels(compiler, family, library)
            library = library.replace(folder / library_name(family, recipe, library))
    except (OSError, OutputError) as error:
        raise KernelError(f"the compiled kernels cannot be stored: {error}") from None
    return _opened(family, library, origin)


def _opened(family: KernelFamily, path: Path, origin: str) -> KernelLibrary:
    try:
        library = ctypes.CDLL(str(path))
        library.end_at_illegal_instructions()
        return KernelLibrary(family, origin, library, WeightLayout.in_dll(library, "layout"))
    except (OSError, ValueError, AttributeError) as error:
        raise KernelError(f"the kernels {path} cannot be loaded: {error}") from None
