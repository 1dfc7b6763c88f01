"""Facts about a model that checks and answers of requests need."""

from dataclasses import dataclass, replace

from mars_ray.engine.process.messages import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the served model, and about the engine that runs it."""

    name: str
    """What callers call the model."""
    created: int
    """Unix time of the model folder, in seconds."""
    engine: EngineFacts
    adapter: str | None = None
    """The adapter that answers under this name; None for the model with its unnamed one, or by itself."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that stand beside the model."""

    def by_name(self, name: str | None) -> "ModelInfo | None":
        """Return what callers call `name`: the model, or one of its adapters; None for neither."""
        if name in self.adapters:
            return replace(self, name=name, adapter=name)
        return self if name in (None, self.name) else None
