"""Choose the dtype of a model from the checkpoint and the device, without reading a tensor."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mars_ray.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
"""Torch name of a dtype that models can run in."""
DtypeOrAuto = Literal["auto", "float32", "bfloat16"]
"""Dtype option; see `resolve_dtype`."""

LARGE = 50_000_000
"""Minimum number of parameters for bfloat16. Measured with 100 million or more parameters, bfloat16 was 1.5 to 5 times
as fast as float32; with 3.4 million it was slower."""
HALF = frozenset({"BF16", "F16"})
"""Names of 16-bit dtypes in safetensors."""
CPU_INFO = Path("/proc/cpuinfo")
FAST_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags in /proc/cpuinfo of CPUs that multiply in bfloat16; 'bf16' is the flag of ARM."""
KERNEL_MODEL_TYPES = frozenset({"gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Decoders, by the `model_type` of their configuration, that the engine's kernels compute (`engine/kernels`). Kernels
unpack bfloat16 as they multiply, on every CPU. A step waits for the weights, which take half as long to arrive."""


@dataclass(frozen=True, slots=True)
class ResolvedDtype:
    """The dtype of a model, and the reason for it."""

    name: Dtype
    reason: str


def check_dtype(dtype: object) -> None:
    """Raise `ConfigError` for a value that names no dtype."""
    known = get_args(DtypeOrAuto)
    if not isinstance(dtype, str) or dtype not in known:
        raise ConfigError(f"dtype is {dtype!r}, must be {', '.join(known[:-1])} or {known[-1]}.")


def resolve_dtype(
    dtype: DtypeOrAuto, parameters: Counter[str], device: str, model_type: str | None = None
) -> ResolvedDtype:
    """Return `dtype`, with "auto" resolved: bfloat16 for a large 16-bit checkpoint where that is fast, and float32
    otherwise.

    `parameters` are the numbers of parameters of each dtype in the checkpoint. `model_type` is that of the
    configuration if the engine will run the model, and None if torch will, such as for training.
    """
    check_dtype(dtype)
    if dtype != "auto":
        return ResolvedDtype(dtype, "asked for")
    total = parameters.total()
    if 2 * sum(count for name, count in parameters.items() if name in HALF) < total:
        return ResolvedDtype("float32", "the dtype of the checkpoint")
    if total < LARGE:
        return ResolvedDtype("float32", f"bfloat16 gains nothing for {total / 1e6:,.1f} million parameters")
    if device != "cpu" or FAST_FLAGS & cpu_flags():
        return ResolvedDtype("bfloat16", f"the checkpoint has 16 bits, and the {device} is fast at it")
    if model_type in KERNEL_MODEL_TYPES:
        return ResolvedDtype("bfloat16", "the checkpoint has 16 bits, as the kernels of the engine read it")
    return ResolvedDtype("float32", "this processor does not multiply in bfloat16")


def cpu_flags() -> set[str]:
    """Return the features of the processor by their names on Linux; none on other systems."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:  # not Linux
        return set()
    return next((set(line.split()) for line in lines if line.lower().startswith(("flags", "features"))), set())
