"""Options of one engine. This module imports no torch, because processes that only configure engines import it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from mars_ray.engine.checked_fields import as_tuple, check_fields
from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.service_class import ServiceClass
from mars_ray.errors import ConfigError, did_you_mean
from mars_ray.machines.registry import step_model
from mars_ray.machines.step_model import StepModel

EngineName = Literal["mars", "vllm"]
"""Engines: `mars` is the one of this package, `vllm` is vLLM with the plug-in of `mars_ray/vllm`."""

Quantize = Literal["int8", "int4"]
"""Number format of the weights of linear layers: 8 bits, or 4 bits with 8 bits in the output head. Inputs are rounded
to 8 bits. Groups of 64 weights share a scale."""

MARS_ONLY = ("max_kv_tokens", "quantize", "rehearse", "adapter_memory_gib")
"""Options that only the engine `mars` has. None leaves each unset."""

AtLeastOne = Annotated[int, Field(ge=1)]
"""A count of at least 1."""


def _checked_machine(name: str) -> str:
    """Return the name of a machine; for a file, its absolute path."""
    try:
        step_model(name)
    except ConfigError as error:
        raise ValueError(str(error).rstrip(".")) from None  # pydantic adds the place in the config file
    path = Path(name)
    return str(path.absolute()) if path.is_file() else name


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTuning:
    """Sizes and number formats of an engine: the options shared by Python, jobs and Serve config files.

    Raises `ConfigError`, which names each option of a wrong type or out of range.
    """

    engine: EngineName | None = None
    """Engine that decodes. None chooses vLLM on a CUDA GPU if vLLM is installed and supports the model and the other
    options, and `mars` otherwise."""
    max_num_seqs: AtLeastOne | None = None
    """Maximum number of sequences decoded together. None chooses the number by device."""
    max_kv_tokens: AtLeastOne | None = None
    """Capacity of the KV cache in tokens. None derives it from the free memory."""
    max_prefill_tokens: AtLeastOne = 512
    """Maximum number of prompt tokens read per step."""
    quantize: Quantize | None = None
    """Number format that weights are rounded to when the engine starts; None keeps them unchanged. Requires a CPU that
    the kernels of `engine/kernels` support."""
    adapter_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of adapters with a name, in GiB. Adapters beyond it leave the memory in least-recently-used order, when no
    request uses them, and return with the next request for them. None keeps all in memory."""
    rehearse: Annotated[str, AfterValidator(_checked_machine)] | None = None
    """Machine and network whose step times the engine takes, such as 'h200/qwen2.5-7b', or a YAML file that every node
    has. Faster steps wait, and slower steps are counted. None takes the time of this machine."""
    tensor_parallel_size: AtLeastOne = 1
    """Number of GPUs that share one copy of the model. Above 1, the engine must be vLLM."""
    vllm_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, such as `gpu_memory_utilization`. Only for the engine `vllm`."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def tuning(self) -> dict[str, Any]:
        """The options of `EngineTuning` by name, as keyword arguments for another class with the same options."""
        return {option.name: getattr(self, option.name) for option in fields(EngineTuning)}

    @property
    def step_model(self) -> StepModel | None:
        """Model of the machine whose step times the engine takes; None for the time of this machine."""
        return None if self.rehearse is None else step_model(self.rehearse)

    @property
    def notice(self) -> str:
        """Sentence that goes with every figure of the engine; empty if its figures are those of this machine."""
        return "" if self.step_model is None else self.step_model.notice

    @property
    def paths(self) -> dict[str, str]:
        """Options that name a file, with its absolute path."""
        return {} if self.rehearse is None else {"rehearse": self.rehearse}

    def check_real_time(self, purpose: str) -> None:
        """Raise `ConfigError` if steps take the times of another machine, because `purpose` measures this one."""
        if self.rehearse is not None:
            raise ConfigError(f"rehearse is {self.rehearse!r}; {purpose} measures this machine, so omit it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(EngineTuning):
    """All options of one engine."""

    max_waiting_seqs: AtLeastOne = 1024
    """Maximum number of waiting sequences."""
    max_request_tokens: AtLeastOne = 65536
    """Maximum number of tokens that one request may generate, in all its sequences together."""
    threshold: float = DEFAULT_THRESHOLD
    """Threshold of requests that do not set one. It can be changed for each class while the engine runs."""
    classes: Annotated[tuple[ServiceClass, ...], BeforeValidator(as_tuple)] = (ServiceClass(),)
    """Service classes that requests may choose."""


DEFAULT_OPTIONS = EngineOptions()


def options_by_name(values: Mapping[str, Any]) -> EngineOptions:
    """Return the options with these values, keyed by their names.

    Raises `ConfigError` for an unknown name, and for a value of the wrong type or out of bounds.
    """
    known = [option.name for option in fields(EngineOptions)]
    for name in values:
        if name not in known:
            hint = did_you_mean(name, known) or f" The options are {', '.join(known)}."
            raise ConfigError(f"{name!r} is not an option of the engine.{hint}")
    return EngineOptions(**values)
