"""Classes of service: priority, share of the engine, and lowest threshold of their requests."""

from pydantic import BaseModel, ConfigDict, Field

from mars_ray.errors import ConfigError

STANDARD = "standard"
"""The only class of an engine without configured classes."""
BATCH_CLASS = "batch"
"""Name of the class, if configured, for requests that may wait until others leave room."""


class ServiceClass(BaseModel):
    """One class of service."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(STANDARD, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    floor: float | None = Field(None, ge=0, le=1)
    """Lowest threshold a controller may set for its requests; None leaves the limit to the controller."""
    priority: int = 0
    """Requests of a higher priority get slots first, whatever the shares."""
    share: float = Field(1.0, gt=0)
    """Weight of the class when classes of one priority compete for tokens."""


def class_names(classes: tuple[ServiceClass, ...]) -> list[str]:
    """Return the names of classes. Raises `ConfigError` unless there is at least one and all names differ."""
    names = [service_class.name for service_class in classes]
    if not names or len(names) != len(set(names)):
        raise ConfigError(
            f"the classes of service are {', '.join(names) or 'none'}; give at least one, each name once."
        )
    return names
