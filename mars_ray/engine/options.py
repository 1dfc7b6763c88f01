"""Options of one engine, in a module that loads no torch: processes that only configure an engine import it."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.service_class import ServiceClass

Quantize = Literal["int8", "int4"]
"""Bits of the weights of linear layers: 8, or 4 with 8 in the output head. Inputs are rounded to 8
bits; groups of 32 weights share a scale."""

AtLeastOne = Annotated[int, Field(ge=1)]
"""A count that a config file is checked for when it is read, and `resolve_limits` when an engine starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTuning:
    """Sizes and number formats of an engine: the options that Python, a job and a Serve config file have in common."""

    max_num_seqs: AtLeastOne | None = None
    """Sequences decoded together; None derives the number from the device."""
    max_kv_tokens: AtLeastOne | None = None
    """Tokens that the KV cache holds; None derives the number from the free memory."""
    max_prefill_tokens: AtLeastOne = 512
    """Prompt tokens read per step."""
    quantize: Quantize | None = None
    """Bits the weights are rounded to when the engine starts; None keeps them as they are. Needs a CPU with the
    kernels of `engine/kernels`."""
    compiled: bool = True
    """Compile steps that run through torch in the background, if a compiler is present."""

    @property
    def tuning(self) -> dict[str, Any]:
        """The options of `EngineTuning` by name, as arguments of another class that has them."""
        return {field.name: getattr(self, field.name) for field in fields(EngineTuning)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(EngineTuning):
    """All options of one engine."""

    max_waiting_seqs: AtLeastOne = 1024
    """Sequences that may wait."""
    max_request_tokens: AtLeastOne = 65536
    """Tokens one request may generate, all of its sequences together."""
    threshold: float = DEFAULT_THRESHOLD
    """Threshold of requests that name none; it can be changed for each class while the engine runs."""
    classes: tuple[ServiceClass, ...] = (ServiceClass(),)
    """Classes of service that requests may name."""


DEFAULT_OPTIONS = EngineOptions()
