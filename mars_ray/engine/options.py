"""Options of one engine. This module imports no torch, because processes that only configure engines import it."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.service_class import ServiceClass

Quantize = Literal["int8", "int4"]
"""Number format of the weights of linear layers: 8 bits, or 4 bits with 8 bits in the output head. Inputs are rounded
to 8 bits. Groups of 32 weights share a scale."""

AtLeastOne = Annotated[int, Field(ge=1)]
"""A count of at least 1. Values in config files are checked when the file is read, other options when an engine
starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTuning:
    """Sizes and number formats of an engine: the options shared by Python, jobs and Serve config files."""

    max_num_seqs: AtLeastOne | None = None
    """Maximum number of sequences decoded together. None chooses the number by device."""
    max_kv_tokens: AtLeastOne | None = None
    """Capacity of the KV cache in tokens. None derives it from the free memory."""
    max_prefill_tokens: AtLeastOne = 512
    """Maximum number of prompt tokens read per step."""
    quantize: Quantize | None = None
    """Number format that weights are rounded to when the engine starts; None keeps them unchanged. Requires a CPU that
    the kernels of `engine/kernels` support."""
    compiled: bool = True
    """Compile steps in the background, if they run through torch and a compiler is present."""

    @property
    def tuning(self) -> dict[str, Any]:
        """The options of `EngineTuning` by name, as keyword arguments for another class with the same options."""
        return {field.name: getattr(self, field.name) for field in fields(EngineTuning)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(EngineTuning):
    """All options of one engine."""

    max_waiting_seqs: AtLeastOne = 1024
    """Maximum number of waiting sequences."""
    max_request_tokens: AtLeastOne = 65536
    """Maximum number of tokens that one request may generate, in all its sequences together."""
    threshold: float = DEFAULT_THRESHOLD
    """Threshold of requests that do not set one. It can be changed for each class while the engine runs."""
    classes: tuple[ServiceClass, ...] = (ServiceClass(),)
    """Service classes that requests may choose."""


DEFAULT_OPTIONS = EngineOptions()
