"""Families of kernels: one source, compiled for the vector instructions of different processors.

`MARS_RAY_KERNELS` chooses a family by its name, or `off` for none. Without it, the best family that the processor
supports is used. Families sum in different orders, so their answers may differ in near ties. Within a family, the
logits of a position depend on its own tokens only.
"""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from mars_ray.errors import ConfigError, ModelError
from mars_ray.model.dtype import cpu_flags

VARIABLE = "MARS_RAY_KERNELS"
OFF = "off"
MACHINES = {"amd64": "x86_64", "aarch64": "arm64"}
"""Architectures that systems name differently."""


class KernelError(ModelError):
    """The kernels cannot run on this machine, or do not support the network."""


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """The instructions of one build."""

    name: str
    machine: str
    """Architecture: x86_64 or arm64."""
    needs: frozenset[str]
    """Processor features, by their names in /proc/cpuinfo on Linux."""
    flags: tuple[str, ...]
    """Compiler flags that allow these features and no others, so that a build is the same on every machine."""


AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
"""Features of `-march=x86-64-v3`."""
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
"""Features of `-march=x86-64-v4`."""
AVX512_BF16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
AVX512_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
FAMILIES = (
    KernelFamily(
        "amx",
        "x86_64",
        AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    KernelFamily("avx512_bf16", "x86_64", AVX512_BF16, AVX512_BF16_FLAGS),
    KernelFamily("avx512_vnni", "x86_64", AVX512 | {"avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni")),
    KernelFamily("avx512", "x86_64", AVX512, ("-march=x86-64-v4",)),
    KernelFamily("avx2_vnni", "x86_64", AVX2 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),
    KernelFamily("avx2", "x86_64", AVX2, ("-march=x86-64-v3",)),
    KernelFamily("neon_bf16", "arm64", frozenset({"asimd", "asimddp", "bf16"}), ("-march=armv8.2-a+dotprod+bf16",)),
    KernelFamily("neon_dotprod", "arm64", frozenset({"asimd", "asimddp"}), ("-march=armv8.2-a+dotprod",)),
    KernelFamily("neon", "arm64", frozenset({"asimd"}), ("-march=armv8-a",)),
)
"""All families, the best of each architecture first."""
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""System call, its command and the state, from asm/unistd_64.h, asm/prctl.h and asm/fpu/types.h of Linux."""
SYSCTLS = {
    "hw.optional.arm64": "asimd",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_BF16": "bf16",
}
"""Names that macOS has for features of ARM processors, and their names on Linux."""


def chosen_family() -> KernelFamily:
    """Return the family that `MARS_RAY_KERNELS` names, or else the best one that the processor supports.

    Raises `ConfigError` for an unknown name and for a family that the processor does not support, and `KernelError` if
    kernels are off or no family fits.
    """
    name = os.environ.get(VARIABLE, "")
    if name == OFF:
        raise KernelError(f"{VARIABLE} is {OFF}.")
    known = {family.name: family for family in FAMILIES}
    if name and name not in known:
        raise ConfigError(f"{VARIABLE} is {name!r}; choose from {', '.join(known)} and {OFF}.")
    if name:
        if reason := lack(known[name]):
            raise ConfigError(f"{VARIABLE} is {name}, but {reason}. Choose another family, or unset it.")
        return known[name]
    fitting = supported_families()
    if not fitting:
        least = {family.machine: family for family in FAMILIES}  # the family with the fewest needs
        smallest = [least[machine()]] if machine() in least else list(least.values())
        raise KernelError("; ".join(lack(family) or "" for family in smallest) + ".")
    return fitting[0]


def supported_families() -> list[KernelFamily]:
    """Return the families that the processor supports, the best first."""
    return [family for family in FAMILIES if lack(family) is None]


def lack(family: KernelFamily) -> str | None:
    """Return why the processor does not support a family, or None if it does."""
    if family.machine != machine():
        return f"the processor is {machine()}, not {family.machine}"
    if missing := family.needs - set(_features()):
        return f"the processor lacks {', '.join(sorted(missing))}"
    if "amx_tile" in family.needs and not _are_tiles_permitted():
        return "the system does not let this process use AMX"
    return None


@cache
def _are_tiles_permitted() -> bool:
    """Ask Linux for the tile registers of AMX, and return whether this process may use them."""
    refused: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return refused == 0


def machine() -> str:
    """Return the architecture of this system: x86_64, arm64, or the system's own name for another."""
    name = platform.machine().lower()
    return MACHINES.get(name, name)


def _features() -> Collection[str]:
    """Return the features of the processor by their names on Linux. Raises `KernelError`."""
    if sys.platform == "darwin":
        if machine() != "arm64":
            raise KernelError("on macOS the kernels run on Apple silicon only.")
        try:
            printed = subprocess.run(["/usr/sbin/sysctl", "hw.optional"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise KernelError(f"the features of the processor cannot be read: {error}.") from None
        return sysctl_features(printed.stdout)
    if flags := cpu_flags():
        return flags
    raise KernelError(
        "/proc/cpuinfo names no features of the processor. The kernels run on Linux, where they need it, and macOS."
    )


def sysctl_features(printed: str) -> set[str]:
    """Return the features, by their names on Linux, in what macOS prints for `sysctl hw.optional`."""
    values = dict(line.partition(": ")[::2] for line in printed.splitlines())
    return {feature for name, feature in SYSCTLS.items() if values.get(name) == "1"}
