"""Facts about a model that are needed to check and answer requests."""

from dataclasses import dataclass, replace

from mars_ray.engine.process.messages import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the served model, and about the engine that runs it."""

    name: str
    """Name under which callers request the model."""
    created: int
    """Unix time of the model folder, in seconds."""
    engine: EngineFacts
    adapter: str | None = None
    """The adapter that answers under this name; None for the model itself, with its unnamed adapter or with none."""
    served_names: tuple[str, ...] = ()
    """Further names under which callers may request the model."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that are served in addition to the model."""

    def all_names(self) -> list["ModelInfo"]:
        """Return the facts about the model and about each adapter, once for each of their names."""
        names = (None, *self.served_names, *self.adapters)
        return [info for name in names if (info := self.by_name(name))]

    def by_name(self, name: str | None) -> "ModelInfo | None":
        """Return the facts about the model or adapter `name`, or None if it is unknown. No name means the model."""
        if name in self.adapters:
            return replace(self, name=name, adapter=name)
        if name in self.served_names:
            return replace(self, name=name)
        return self if name in (None, self.name) else None
