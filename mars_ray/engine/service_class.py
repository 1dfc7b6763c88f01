"""Service classes of requests: priority, share of the engine, and lowest threshold."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from mars_ray.errors import ConfigError

STANDARD = "standard"
"""Name of the only class of an engine without configured classes."""
BATCH_CLASS = "batch"
"""Name of the class for requests that may wait until other classes leave room. The class need not be configured."""


class ServiceClass(BaseModel):
    """How requests of one class are served beside those of the others."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(STANDARD, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    floor: float | None = Field(None, ge=0, le=1)
    """Lowest threshold that a controller may set for this class; None leaves the limit to the controller."""
    priority: int = 0
    """Priority for slots. Requests of a higher priority are served first, regardless of shares."""
    share: float = Field(1.0, gt=0)
    """Weight of the class when classes of equal priority compete for tokens."""


def waiting_places(classes: Sequence[ServiceClass], max_waiting_seqs: int) -> dict[str, int]:
    """Return how many sequences of each class may wait in an engine where `max_waiting_seqs` may wait in all."""
    shares = sum(service_class.share for service_class in classes)
    return {
        service_class.name: max(1, int(max_waiting_seqs * service_class.share / shares)) for service_class in classes
    }


def class_names(classes: tuple[ServiceClass, ...]) -> list[str]:
    """Return the names of service classes. Raises `ConfigError` if there are none or two have the same name."""
    names = [service_class.name for service_class in classes]
    if not names or len(names) != len(set(names)):
        raise ConfigError(
            f"the classes of service are {', '.join(names) or 'none'}; give at least one, each name once."
        )
    return names
