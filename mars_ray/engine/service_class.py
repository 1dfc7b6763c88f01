"""Classes of service: whose requests go first, how the engine is divided among them, how good answers must be."""

from pydantic import BaseModel, ConfigDict, Field

from mars_ray.errors import ConfigError

STANDARD = "standard"
"""The class of requests that name none, where the operator set no classes."""
BATCH_CLASS = "batch"
"""The class, where there is one of this name, of requests that may wait until others leave room."""


class ServiceClass(BaseModel):
    """One class of service."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(STANDARD, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    floor: float | None = Field(None, ge=0, le=1)
    """No controller lowers the threshold of its requests below this; None leaves it to the controller."""
    priority: int = 0
    """Requests of a higher priority get slots before those of a lower one, whatever their shares."""
    share: float = Field(1.0, gt=0)
    """Share of the tokens against other classes of the same priority, while all of them want more than there are."""


def check_classes(classes: tuple[ServiceClass, ...]) -> None:
    """Raise a `ConfigError` unless there is at least one class and all names differ."""
    names = [each.name for each in classes]
    if not names or len(names) != len(set(names)):
        raise ConfigError(f"classes of service are named {', '.join(names) or 'nowhere'}; give one or more, each once.")
