"""The choice of a family of kernels by the processor and the environment, and the libraries it loads."""

import os
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.kernels import build, families
from mars_ray.engine.kernels.build import kernel_library, load_family
from mars_ray.engine.kernels.families import (
    FAMILIES,
    VARIABLE,
    KernelError,
    KernelFamily,
    chosen_family,
    supported_families,
)
from mars_ray.engine.kernels.library_file import FLAGS, SOURCE, compile_kernels, find_compiler
from mars_ray.engine.options import EngineOptions
from mars_ray.errors import ConfigError
from tests.engine.stand_in_kernels import compile_stand_in
from tests.factories.engine import bundled_checkpoint

try:
    kernel_library()
except KernelError as reason:
    pytest.skip(f"no kernels here: {reason}", allow_module_level=True)


M1 = """hw.optional.arm.FEAT_FHM: 1
hw.optional.arm.FEAT_SPECRES: 0
hw.optional.arm.FEAT_FP16: 1
hw.optional.floatingpoint: 1
hw.optional.AdvSIMD: 1
hw.optional.watchpoint: 4
hw.optional.arm64: 1
"""
"""Some lines that an Apple M1 prints for `sysctl hw.optional`, without those that the kernels' families differ in."""


def load_again() -> build.KernelLibrary:
    return load_family.__wrapped__(chosen_family())


def test_without_a_compiler_the_reason_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(KernelError, match="no-such-compiler cannot be run"):
        load_again()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.machine == families.machine()])
def test_the_sources_of_every_family_are_valid_also_where_the_processor_lacks_it(family: KernelFamily) -> None:
    if family not in supported_families():  # the others are compiled by further tests
        subprocess.run([find_compiler(), *FLAGS, "-O0", *family.flags, "-fsyntax-only", str(SOURCE)], check=True)


def test_the_environment_chooses_the_family_and_its_layout(family: str) -> None:
    library = kernel_library()
    assert library.family.name == family
    assert library.layout.columns == {"amx": 32, "avx512": 32, "avx2": 16, "neon": 8}[family.split("_")[0]]
    assert library.layout.pairs == (family == "amx" or family.endswith("bf16"))


def test_the_best_family_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen_family() == supported_families()[0]


@pytest.mark.parametrize(
    ("machine", "features", "best"),
    [
        ("x86_64", ["avx2 fma f16c bmi1 bmi2 abm movbe"], "avx2"),
        ("x86_64", ["avx2 fma f16c bmi1 bmi2 abm movbe avx_vnni"], "avx2_vnni"),
        ("x86_64", ["avx2 fma f16c bmi1 bmi2 abm movbe avx512f avx512bw avx512cd avx512dq avx512vl"], "avx512"),
        ("AMD64", ["avx2 fma f16c bmi1 bmi2 abm movbe avx512f avx512bw avx512vl avx512_vnni"], "avx2"),
        ("aarch64", ["fp asimd evtstrm"], "neon"),
        ("arm64", ["fp asimd asimddp"], "neon_dotprod"),
        ("aarch64", ["fp asimd asimddp i8mm bf16"], "neon_bf16"),
    ],
)
def test_the_best_family_follows_from_the_features_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, machine: str, features: list[str], best: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(families, "_features", lambda: features[0].split())
    assert supported_families()[0].name == best


@pytest.mark.parametrize(
    ("printed", "best"),
    [
        (M1 + "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_BF16: 0\n", "neon_dotprod"),
        (M1 + "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_BF16: 1\n", "neon_bf16"),  # M2 and later
        (M1, "neon"),  # a macOS that has no names for the others
    ],
)
def test_the_best_family_on_macos_follows_from_sysctl(monkeypatch: pytest.MonkeyPatch, printed: str, best: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr(families, "_features", lambda: families.sysctl_features(printed))
    assert supported_families()[0].name == best


def test_an_unknown_family_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sse9")
    with pytest.raises(ConfigError, match=r"MARS_RAY_KERNELS is 'sse9'; choose from amx, .* and off"):
        Engine(bundled_checkpoint(), EngineOptions())


def test_a_family_that_the_processor_lacks_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_features", lambda: ["avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv(VARIABLE, "avx2_vnni")
    with pytest.raises(ConfigError, match="MARS_RAY_KERNELS is avx2_vnni, but the processor lacks avx_vnni"):
        chosen_family()
    monkeypatch.setenv(VARIABLE, "neon")
    with pytest.raises(ConfigError, match="the processor is x86_64, not arm64"):
        chosen_family()


def test_a_system_that_does_not_permit_amx_runs_the_next_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(families, "_features", lambda: FAMILIES[0].needs)
    monkeypatch.setattr(families, "_are_tiles_permitted", lambda: False)
    assert supported_families()[0].name == "avx512_bf16"
    monkeypatch.setenv(VARIABLE, "amx")
    with pytest.raises(ConfigError, match="MARS_RAY_KERNELS is amx, but the system does not let this process use AMX"):
        chosen_family()


def test_without_kernels_an_engine_runs_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert Engine(bundled_checkpoint(), EngineOptions()).kernels == "torch, because MARS_RAY_KERNELS is off."


def test_a_processor_without_any_family_lacks_features_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(families, "_features", lambda: ["sse2", "avx2", "f16c", "bmi1", "bmi2", "abm", "movbe"])
    with pytest.raises(KernelError, match=r"^the processor lacks fma\.$"):
        chosen_family()


def test_names_of_families_are_unique_and_each_is_better_than_the_next() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for better, other in pairwise(FAMILIES):
        assert better.machine != other.machine or not better.needs <= other.needs


@pytest.mark.parametrize(
    "compile_library",
    [
        pytest.param(compile_stand_in, id="a stand-in"),
        pytest.param(compile_kernels, id="kernels", marks=pytest.mark.slow),
    ],
)
def test_kernels_are_compiled_once_and_a_half_written_library_is_never_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compile_library: Callable[..., None]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build, "compile_kernels", compile_library)
    load_again()
    (library,) = (tmp_path / build.CACHE).iterdir()
    monkeypatch.setattr(subprocess, "run", None)  # a second compilation would call it
    load_again()
    assert [path.name for path in (tmp_path / build.CACHE).iterdir()] == [library.name]


def test_a_library_that_others_could_have_written_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(build, "compile_kernels", compile_stand_in)
    load_again()
    (planted,) = (tmp_path / build.CACHE).iterdir()
    planted.chmod(0o777)
    (tmp_path / build.CACHE).chmod(0o777)

    def compiled_anew(_compiler: str, _family: families.KernelFamily, _library: Path) -> None:
        raise KernelError("compiled anew")

    monkeypatch.setattr(build, "compile_kernels", compiled_anew)
    monkeypatch.setattr(build, "_opened", None)  # loading the planted file would call it
    with pytest.raises(KernelError, match="compiled anew"):
        load_again()
    assert not planted.exists()
    assert (tmp_path / build.CACHE).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_another_account_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / build.CACHE).mkdir(parents=True)
    os.chown(tmp_path / build.CACHE.parent, 65534, 65534)
    with pytest.raises(KernelError, match="mars-ray belongs to another account"):
        load_again()
