"""Files of compiled kernels. A name holds a digest of the recipe and one of the content, so each can be checked.

The build of the wheel uses this file, so it imports only the standard library.
"""

import hashlib
from pathlib import Path

from mars_ray.engine.kernels.compiler import FLAGS, HEADERS, SOURCE, SUFFIX
from mars_ray.engine.kernels.families import KernelError, KernelFamily

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
