"""The dtype a model is run in: what was asked for, or what suits the checkpoint and the device.

No tensor is read. It is decided once: whoever has the answer passes it on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mars_ray.model.weights import count_parameters

Dtype = Literal["float32", "bfloat16"]
"""A dtype that models are run in, by the name torch has for it."""
DtypeOrAuto = Literal["auto", "float32", "bfloat16"]
"""What a user may ask for; see `resolve_dtype`."""

LARGE = 50_000_000
"""Parameters from which halving the bytes of a step gains more than rounding costs: from 100 million on bfloat16 was
1.5 to 5 times as fast, at 3.4 million it was slower than float32."""
HALF = frozenset({"BF16", "F16"})
"""Dtypes of 16 bits, as safetensors names them."""
CPU_INFO = Path("/proc/cpuinfo")
FAST_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of processors that multiply in bfloat16; the last is ARM's."""


@dataclass(frozen=True, slots=True)
class ResolvedDtype:
    """The dtype a model is run in, and why."""

    name: Dtype
    reason: str


def resolve_dtype(asked: DtypeOrAuto, folder: Path, device: str) -> ResolvedDtype:
    """Return the dtype asked for; for 'auto' bfloat16 where the checkpoint, its size and the device speak for it.

    The folder was checked before.
    """
    if asked != "auto":
        return ResolvedDtype(asked, "asked for")
    parameters = count_parameters(folder)
    total = parameters.total()
    if 2 * sum(count for name, count in parameters.items() if name in HALF) < total:
        return ResolvedDtype("float32", "that of the checkpoint")
    if total < LARGE:
        return ResolvedDtype("float32", f"bfloat16 gains nothing for {total / 1e6:,.1f} million parameters")
    if device == "cpu" and not FAST_FLAGS & _cpu_flags():
        return ResolvedDtype("float32", "this processor does not multiply in bfloat16")
    return ResolvedDtype("bfloat16", f"the checkpoint has 16 bits, and the {device} is fast at it")


def _cpu_flags() -> set[str]:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:  # no Linux
        return set()
    return {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
