"""What must be known of a model to check requests for it and to answer them."""

from dataclasses import dataclass

from mars_ray.engine.process.messages import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the served model, and about the engine that runs it."""

    name: str
    """What callers call the model."""
    created: int
    """Unix time of the model folder, in seconds."""
    engine: EngineFacts
