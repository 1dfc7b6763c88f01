"""Kernels that came with the package: which are loaded, which are refused, and the line that says so."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mars_ray.engine.kernels import build, library_file
from mars_ray.engine.kernels.families import VARIABLE, KernelError, KernelFamily, supported_families
from mars_ray.engine.kernels.library_file import library_name, recipe_digest
from tests.engine.stand_in_kernels import compile_stand_in

try:
    FAMILIES = supported_families()
    BEST = FAMILIES[0]
    COMPILER = library_file.find_compiler()
except (KernelError, IndexError) as reason:
    pytest.skip(f"no kernels here: {reason}", allow_module_level=True)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    library = tmp_path_factory.mktemp("stand_in") / "library"
    compile_stand_in(COMPILER, BEST, library)
    return library.read_bytes()


class Package:
    """The folder of kernels of an installed package."""

    def __init__(self, folder: Path, content: bytes) -> None:
        self.folder, self.content = folder, content
        folder.mkdir()

    def add(self, family: KernelFamily, recipe: str | None = None) -> Path:
        library = self.folder / "new"
        library.write_bytes(self.content)
        return library.replace(self.folder / library_name(family, recipe or recipe_digest(family), library))


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: bytes) -> Iterator[Package]:
    """A package without kernels yet, on a machine without a compiler."""
    monkeypatch.setattr(library_file, "BUILT", tmp_path / "built")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "")
    for name in ("CXX", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    build.load_family.cache_clear()
    build.load_built.cache_clear()
    yield Package(tmp_path / "built", stand_in)
    build.load_family.cache_clear()
    build.load_built.cache_clear()


def test_built_kernels_need_no_compiler_and_no_cache(package: Package, tmp_path: Path) -> None:
    package.add(BEST)
    library = build.kernel_library()
    assert (library.family, library.origin) == (BEST, "built in")
    assert not (tmp_path / "home").exists()


def test_without_built_kernels_and_without_a_compiler_both_are_named() -> None:
    with pytest.raises(KernelError, match=f"has no kernels for {BEST.name}, and there is no C.. compiler. Install g"):
        build.kernel_library()


def test_changed_kernels_are_not_loaded(package: Package) -> None:
    library = package.add(BEST)
    library.write_bytes(library.read_bytes() + b"\0")
    with pytest.raises(KernelError, match=f"{library} were changed since they were built"):
        build.kernel_library()


def test_kernels_of_another_version_are_not_loaded(package: Package) -> None:
    library = package.add(BEST, recipe="0" * library_file.DIGITS)
    with pytest.raises(KernelError, match=f"{library} are of another version"):
        build.kernel_library()


def test_kernels_of_other_sources_are_of_another_version(
    package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package.add(BEST)
    changed = tmp_path / "decoder.cpp"
    changed.write_text(library_file.SOURCE.read_text() + "// changed")
    monkeypatch.setattr(library_file, "SOURCE", changed)
    with pytest.raises(KernelError, match="of another version"):
        build.kernel_library()


def test_a_compiler_takes_the_place_of_kernels_that_are_refused(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.add(BEST, recipe="0" * library_file.DIGITS)
    monkeypatch.setenv("CXX", COMPILER)
    monkeypatch.setattr(build, "compile_kernels", lambda _compiler, _family, file: file.write_bytes(package.content))
    assert build.kernel_library().origin.startswith("compiled on this machine, because the kernels ")


@pytest.mark.skipif(len(FAMILIES) < 2, reason="needs a processor with two families")
def test_the_best_built_family_takes_the_place_of_one_that_the_build_could_not_compile(package: Package) -> None:
    package.add(FAMILIES[-1])
    library = build.kernel_library()
    assert library.family == FAMILIES[-1]
    assert library.origin.startswith(f"built in, because the installed package has no kernels for {BEST.name}")


@pytest.mark.skipif(len(FAMILIES) < 2, reason="needs a processor with two families")
def test_a_family_chosen_by_name_is_not_replaced(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    package.add(FAMILIES[-1])
    monkeypatch.setenv(VARIABLE, BEST.name)
    with pytest.raises(KernelError, match=f"no kernels for {BEST.name}"):
        build.kernel_library()


def test_a_family_that_the_processor_has_lost_is_not_chosen_again(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in FAMILIES:
        package.add(family)
    assert build.kernel_library().family == BEST
    kept = FAMILIES[-1]
    monkeypatch.setattr("mars_ray.engine.kernels.families._features", lambda: kept.needs)
    assert build.kernel_library().family == kept
