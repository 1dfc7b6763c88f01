"""What an engine says of itself between two steps."""

from dataclasses import dataclass

from mars_ray.engine.profile import ProfilePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The engine at one moment."""

    running: int
    """Sequences that have a row."""
    waiting: int
    """Sequences in the queue."""
    kv_use: float
    """Share of the cache's positions that running sequences fill."""
    preemptions: int
    """Sequences that gave their row back so far."""
    threshold: float
    """Of requests that name none."""
    threshold_changes: int
    """How often it took another value so far."""
    profile: tuple[ProfilePoint, ...]
