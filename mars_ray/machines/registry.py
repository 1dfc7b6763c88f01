"""Find modelled machines by name, or read them from files.

A name is GPU/NETWORK or GPU/NETWORK/PROFILE, such as h200/qwen2.5-7b/paper. "-fp8" after the network means 8-bit
weights. A file holds YAML or JSON with the keys of `MachineFile`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from mars_ray.errors import ConfigError, first_line
from mars_ray.machines.step_model import (
    EFFICIENCIES,
    GPUS,
    MEMORY_SHARE,
    NETWORKS,
    Efficiency,
    Gpu,
    Network,
    StepModel,
    Weights,
)

FILE_SUFFIXES = (".yaml", ".yml", ".json")
DEFAULT_EFFICIENCY = "vllm"
FP8_SUFFIX = "-fp8"

Entry = TypeVar("Entry", bound=BaseModel)


class MachineFile(BaseModel):
    """The content of a machine file. Each part is either a known name or a mapping with the figures themselves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str | Gpu
    network: str | Network
    efficiency: str | Efficiency = DEFAULT_EFFICIENCY
    weights: Weights = "bf16"


def step_model(name: str) -> StepModel:
    """Return the step model with the given name, or read it from a file. Raises a `ConfigError` that quotes an unknown
    name and lists the known ones."""
    if name.endswith(FILE_SUFFIXES):
        return _from_file(Path(name))
    parts = name.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise ConfigError(
            f"machine {name!r} is unknown; give GPU/NETWORK, such as h200/qwen2.5-7b, or a file. {known()}"
        )
    gpu, network, efficiency = (*parts, DEFAULT_EFFICIENCY)[:3]
    weights: Weights = "fp8" if network.endswith(FP8_SUFFIX) else "bf16"
    return _checked(
        StepModel(
            name=f"{gpu}/{network}/{efficiency}",
            gpu=_entry(name, "gpu", gpu, GPUS),
            network=_entry(name, "network", network.removesuffix(FP8_SUFFIX), NETWORKS),
            efficiency=_entry(name, "efficiency", efficiency, EFFICIENCIES),
            weights=weights,
        )
    )


def known() -> str:
    """Return a sentence that lists the known names."""
    return (
        f"GPUs are {', '.join(GPUS)}; networks {', '.join(NETWORKS)} (with {FP8_SUFFIX} for 8-bit weights); "
        f"profiles {', '.join(EFFICIENCIES)}."
    )


def _from_file(path: Path) -> StepModel:
    try:
        content = yaml.safe_load(path.read_text())  # this also reads JSON, because JSON is valid YAML
        file = MachineFile.model_validate(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give a machine file, or GPU/NETWORK.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML or JSON: {first_line(error)}.") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from None
    return _checked(
        StepModel(
            name=str(path),
            gpu=_entry(str(path), "gpu", file.gpu, GPUS),
            network=_entry(str(path), "network", file.network, NETWORKS),
            efficiency=_entry(str(path), "efficiency", file.efficiency, EFFICIENCIES),
            weights=file.weights,
        )
    )


def _entry(machine: str, kind: str, value: str | Entry, entries: Mapping[str, Entry]) -> Entry:
    """Return the figures that belong to a name. Figures that a file gives directly are returned unchanged."""
    if not isinstance(value, str):
        return value
    if value not in entries:
        raise ConfigError(
            f"machine {machine!r}: {kind} {value!r} is unknown; choose one of {', '.join(entries)}, or write a file."
        )
    return entries[value]


def _checked(model: StepModel) -> StepModel:
    """Return the model. Raises `ConfigError` if the weights do not fit on the GPU, or the GPU has no rate for them."""
    if model.weights == "fp8" and model.gpu.fp8_tflops is None:
        raise ConfigError(f"machine {model.name!r} has fp8 weights, but its GPU has no fp8 rate; use bf16 weights.")
    if model.max_kv_tokens < 2:
        raise ConfigError(
            f"machine {model.name!r} has weights of {model.weight_bytes / 1e9:.1f} GB; weights and cache must fit into "
            f"{MEMORY_SHARE:.0%} of {model.gpu.memory_gb:g} GB. Choose a larger GPU."
        )
    return model


def _first_problem(error: ValidationError) -> str:
    """Return a sentence about the most specific problem in a machine file. It names the key, and the value or the known
    keys."""
    problems: list[Any] = list(error.errors())
    # A mapping is first validated as a name, which always fails. Errors from inside the mapping are more informative.
    first = max(problems, key=lambda problem: (len(problem["loc"]), problem["type"] == "extra_forbidden"))
    key = ".".join(part for part in map(str, first["loc"]) if not part[0].isupper() and part != "str") or "the file"
    match first["type"]:
        case "missing":
            return f"{key} is missing; give it."
        case "extra_forbidden":
            parts: dict[str, type[BaseModel]] = {"gpu": Gpu, "network": Network, "efficiency": Efficiency}
            owner = parts.get(str(first["loc"][0]), MachineFile)
            return f"{key} is unknown; known are {', '.join(owner.model_fields)}."
        case "model_type":
            return f"the file must hold a mapping with the keys {', '.join(MachineFile.model_fields)}."
    return f"{key} is {first['input']!r}: {first['msg']}."
