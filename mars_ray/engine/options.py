"""The sizes and defaults of one engine, apart from it: who starts one in another process need not load torch."""

from dataclasses import dataclass
from typing import Literal

from mars_ray.engine.mode import DEFAULT_THRESHOLD
from mars_ray.engine.service_class import ServiceClass

Quantize = Literal["int8", "int4"]
"""Bits of the weights of linear layers: 8, or 4 and in the output head 8. Inputs are rounded to 8
bits; groups of 32 share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Sizes and defaults of one engine; None derives a value from the model and the free memory."""

    max_num_seqs: int | None = None
    """Sequences that run at a time."""
    max_kv_tokens: int | None = None
    """Tokens the KV cache holds."""
    max_waiting_seqs: int = 1024
    """Sequences that may wait."""
    max_request_tokens: int = 65536
    """Tokens one request may generate, all of its sequences together."""
    max_prefill_tokens: int = 512
    """Prompt tokens read per step."""
    threshold: float = DEFAULT_THRESHOLD
    """Threshold of requests that name none; it may be changed while running, for each class alone."""
    classes: tuple[ServiceClass, ...] = (ServiceClass(),)
    """Classes of service that requests may name."""
    quantize: Quantize | None = None
    """Bits the weights are rounded to when the engine starts; None keeps them as they are. Needs a CPU with the
    kernels of `engine/kernels`."""
    compiled: bool = True
    """Where steps run through torch: compile them in the background if a compiler is present."""


DEFAULT_OPTIONS = EngineOptions()
