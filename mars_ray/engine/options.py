"""The sizes and defaults of one engine, apart from it: who starts one in another process need not load torch."""

from dataclasses import dataclass

from mars_ray.engine.service_class import ServiceClass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Sizes and defaults of one engine; None derives a value from the model and the free memory."""

    rows: int | None = None
    """Sequences that run at a time."""
    kv_tokens: int | None = None
    """Positions the cache holds."""
    queue: int = 1024
    """Sequences that may wait."""
    request_tokens: int = 65536
    """Tokens one request may generate, all of its sequences together."""
    prefill_tokens: int = 512
    """Prompt tokens read per step."""
    threshold: float = 1.0
    """Of requests that name none; may be changed while running, for each class alone. 1 gives the answers of one token
    at a time, sooner."""
    classes: tuple[ServiceClass, ...] = (ServiceClass(),)
    """Of service."""
    compiled: bool = True
    """Compile the decoding step in the background where a compiler is present."""
