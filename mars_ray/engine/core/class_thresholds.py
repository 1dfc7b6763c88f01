"""The thresholds of the classes of service, which may change between two steps."""

from collections import abc

from mars_ray.engine.request import Acceptance
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.errors import ConfigError


class ClassThresholds:
    """For each class the probability a token ahead needs, where the request names no threshold of its own."""

    def __init__(self, by_class: abc.Mapping[str, float]) -> None:
        self.by_class: dict[str, float] = dict(by_class)
        self.changes = 0
        """How often the threshold of a class took another value."""
        self.set(by_class)

    def set(self, by_class: abc.Mapping[str, float]) -> None:
        """Set the thresholds of some classes.

        Raises `ConfigError` for an unknown class or a value out of range, and then changes nothing.
        """
        for name, value in by_class.items():
            if name not in self.by_class:
                raise ConfigError(f"there is no class {name!r}; there are {', '.join(self.by_class)}.")
            if not 0 <= value <= 1:
                raise ConfigError(f"threshold is {value}; it must be from 0 to 1.")
        self.changes += sum(value != self.by_class[name] for name, value in by_class.items())
        self.by_class |= by_class

    def acceptance(self, sequence: Sequence) -> Acceptance | None:
        """Return what tokens at masks of a sequence need now; None where no mask is worth feeding."""
        return sequence.request.decode.acceptance(self.by_class[sequence.service_class])
