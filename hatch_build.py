"""Build hook of the wheel: compile the CPU kernels for every family of this platform that the compiler supports.

Without a C++ compiler the wheel is pure Python. An editable installation compiles its kernels at the first start
instead. The environment variable `HATCH_BUILD_NO_HOOKS=true` turns this hook off.
"""

import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from mars_ray.engine.kernels.families import KernelFamily


class KernelHook(BuildHookInterface[BuilderConfig]):
    """Packs compiled kernels into the wheel."""

    _folder: TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, and tag the wheel for this platform if there are any."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from mars_ray.engine.kernels.families import FAMILIES, KernelError, machine
        from mars_ray.engine.kernels.library_file import find_compiler

        platforms = {"linux": ("x86_64", "arm64"), "darwin": ("arm64",)}
        if machine() not in platforms.get(sys.platform, ()):
            self.app.display_warning(f"The wheel has no CPU kernels: there are none for {sysconfig.get_platform()}.")
            return
        try:
            compiler = find_compiler()
        except KernelError as error:
            self.app.display_warning(f"The wheel has no CPU kernels, because {error}")
            return
        self._folder = TemporaryDirectory()
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            built = threads.map(
                partial(self._compile, compiler), [family for family in FAMILIES if family.machine == machine()]
            )
        libraries = [library for library in built if library]
        if not libraries:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"
        for library in libraries:
            build_data["force_include"][str(library)] = f"mars_ray/engine/kernels/built/{library.name}"
        self.app.display_info(
            f"The wheel has CPU kernels: {', '.join(library.name.partition('-')[0] for library in libraries)}"
        )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the compiled files."""
        if self._folder:
            self._folder.cleanup()

    def _compile(self, compiler: str, family: "KernelFamily") -> Path | None:
        """Return the library of a family, or None if the compiler does not support its instructions."""
        from mars_ray.engine.kernels.families import KernelError
        from mars_ray.engine.kernels.library_file import SUFFIX, compile_kernels, library_name, recipe_digest

        assert self._folder
        library = Path(self._folder.name) / f"{family.name}{SUFFIX}"
        try:
            compile_kernels(compiler, family, library)
        except KernelError as error:
            self.app.display_warning(f"The wheel has no CPU kernels for {family.name}, because {error}")
            return None
        return library.replace(library.with_name(library_name(family, recipe_digest(family), library)))


def _platform_tag() -> str:
    """Return the tag of this system, or of the oldest macOS on Apple silicon."""
    if sys.platform == "darwin":
        return "macosx_11_0_arm64"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
