"""Classes of service: whose requests go first, how the engine is divided among them, how good answers must be.

In:    settings of an operator.
Out:   frozen classes whose every value is in range.
Never: knows a request; requests name their class.
"""

from dataclasses import dataclass

from mars_ray.errors import ConfigError

STANDARD = "standard"
"""The class of requests that name none, where the operator set no classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """One class. Raises `ConfigError` for values out of range."""

    name: str = STANDARD
    floor: float = 0.9
    """No controller lowers the threshold of its requests below this."""
    priority: int = 0
    """Requests of a higher one get rows before those of a lower one, whatever their shares."""
    share: float = 1.0
    """Of the rows, against that of other classes of its priority, while all of them want more than there are."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a class of service has no name; give it one.")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"floor of class {self.name} is {self.floor}; it must be from 0 to 1.")
        if not 0 < self.share < float("inf"):
            raise ConfigError(f"share of class {self.name} is {self.share}; it must be above 0.")


def check_classes(classes: tuple[ServiceClass, ...]) -> None:
    """Raise a `ConfigError` unless there is at least one class and all names differ."""
    names = [each.name for each in classes]
    if not names or len(names) != len(set(names)):
        raise ConfigError(f"classes of service are named {', '.join(names) or 'nowhere'}; give one or more, each once.")
