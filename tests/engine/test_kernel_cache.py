"""The cache of compiled kernels: damage is repaired, and a machine that cannot keep or run them has no kernels."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mars_ray.engine.kernels import build
from mars_ray.engine.kernels.families import KernelError, chosen_family
from mars_ray.engine.kernels.library_file import is_intact
from tests.engine.stand_in_kernels import compile_stand_in


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """An empty cache. Returns the libraries that are compiled into it."""
    libraries: list[Path] = []

    def compile(*arguments: Any) -> None:
        compile_stand_in(*arguments)
        libraries.append(arguments[-1])

    try:
        family = chosen_family()
    except KernelError as reason:
        pytest.skip(f"no kernels here: {reason}")
    monkeypatch.setattr(build, "chosen_family", lambda: replace(family, name="stand_in"))
    monkeypatch.setattr(build, "compile_kernels", compile)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    build.load_family.cache_clear()
    yield libraries
    build.load_family.cache_clear()


@pytest.mark.parametrize("content", [b"", b"changed", b"\x7fELF"])
def test_a_changed_library_is_compiled_once_more_and_never_loaded(compiled: list[Path], content: bytes) -> None:
    build.kernel_library()
    [library] = compiled[0].parents[1].iterdir()
    library.unlink()  # it is mapped, so its content cannot be changed in place
    library.write_bytes(content)
    library.chmod(0o700)
    build.load_family.cache_clear()
    assert build.kernel_library().layout.columns == 7
    assert len(compiled) == 2
    assert is_intact(library)


def test_a_library_that_can_never_be_loaded_is_compiled_once_and_means_no_kernels(
    compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, *_mode: int) -> Any:
        if "stand_in" in name:
            raise OSError(f"{name}: failed to map segment from shared object")
        return load_any(name)

    load_any = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(KernelError, match="failed to map segment"):
        build.kernel_library()
    assert len(compiled) == 1


def test_a_cache_that_cannot_be_written_means_no_kernels(compiled: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "compile_kernels", full)
    with pytest.raises(KernelError, match="No space left"):
        build.kernel_library()
    assert not compiled


def test_an_account_without_a_home_has_no_kernels(compiled: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(KernelError, match="Set HOME"):
        build.kernel_library()
    assert not compiled
