"""What must be known of a model to check requests for it and to answer them."""

from dataclasses import dataclass

from mars_ray.engine.process.messages import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the front must know of the model to check and answer requests."""

    name: str
    """What callers call it."""
    created: int
    """Unix time of its folder, in seconds."""
    engine: EngineFacts
