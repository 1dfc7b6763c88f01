"""Every kernel of every family against scalar code, natively or under qemu."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mars_ray.engine.kernels.families import FAMILIES, KernelFamily, lack
from mars_ray.engine.kernels.library_file import FLAGS, SOURCE

pytestmark = pytest.mark.sanitizers
PROGRAM = Path(__file__).with_name("kernel_numbers.cpp")
CROSS = {"arm64": ("aarch64-linux-gnu-g++", "qemu-aarch64"), "x86_64": ("x86_64-linux-gnu-g++", "qemu-x86_64")}
"""Compiler and emulator of each architecture, by their names in Debian."""
AVX2_VNNI = ("-march=x86-64-v3", "-mavx512f", "-mavx512vl", "-mavx512vnni", "-DKERNELS_AVX2")
"""Flags that give AVX2's kernels the instruction of AVX-VNNI in the encoding of AVX-512."""


def check(compiler: str, flags: tuple[str, ...], runner: list[str], folder: Path) -> None:
    program = folder / "numbers"
    # The scalar code is compiled for the same target.
    sources = SOURCE.parent
    command = [compiler, *FLAGS, *flags, f"-I{sources}", "-static", str(PROGRAM), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ran = subprocess.run([*runner, str(program)], capture_output=True, text=True, check=False, timeout=280)
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_kernels_compute_what_scalar_code_computes(family: KernelFamily, tmp_path: Path) -> None:
    if reason := lack(family):
        compiler, emulator = CROSS[family.machine]
        if family.machine == "x86_64" or not (shutil.which(compiler) and shutil.which(emulator)):
            pytest.skip(f"{reason}; {compiler} and {emulator} (Debian's g++-aarch64-linux-gnu and qemu-user) run arm64")
        check(compiler, family.flags, [emulator, "-cpu", "max"], tmp_path)
    else:
        check(os.environ.get("CXX") or shutil.which("c++") or "g++", family.flags, [], tmp_path)


def test_the_instruction_of_avx_vnni_is_exact(tmp_path: Path) -> None:
    if reason := next((why for family in FAMILIES if family.name == "avx512_vnni" and (why := lack(family))), None):
        pytest.skip(reason)
    check(os.environ.get("CXX") or shutil.which("c++") or "g++", AVX2_VNNI, [], tmp_path)
