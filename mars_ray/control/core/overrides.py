"""Thresholds set by an operator, and their JSON form, in which they survive a restart of the controller.

In:    a class, a threshold, a duration.
Out:   the override in force for a class.
Never: lets an override last beyond its end or lie outside the bounds of its class.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pydantic import TypeAdapter

from mars_ray.control.control_settings import ControlPlan
from mars_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Override:
    """The threshold that an operator set for one class of service."""

    threshold: float
    ends_unix_s: float | None
    """Unix time at which the override ends; None means that it lasts until it is cleared."""


SECONDS_MAX = 366 * 86_400

_BY_CLASS = TypeAdapter(dict[str, Override])
"""Overrides by class, whose JSON is stored."""


class OverrideStore(Protocol):
    """Storage in which the JSON of overrides survives a restart of the controller."""

    def load(self) -> bytes | None:
        """Return the JSON that was saved last; None if there is none."""

    def save(self, overrides: bytes) -> None:
        """Replace the saved JSON."""


class Overrides:
    """The overrides of all classes. Stored overrides are restored if they still fit the plan."""

    def __init__(self, plan: ControlPlan, store: OverrideStore | None, unix_clock: Callable[[], float]) -> None:
        self._plan = plan
        self._store = store
        self._unix_s = unix_clock
        self._names = [service_class.name for service_class in plan.classes]
        saved = store.load() if store else None
        self._by_class = {
            name: override
            for name, override in (_BY_CLASS.validate_json(saved) if saved else {}).items()
            if name in self._names and plan.floor(name) <= override.threshold <= plan.ceiling
        }

    def get(self, name: str) -> Override | None:
        """Return the override of a class, or None. The override may have ended since the last call of `in_force`."""
        return self._by_class.get(name)

    def in_force(self, name: str) -> Override | None:
        """Return the override in force for a class, or None. Drop an override that has ended."""
        override = self._by_class.get(name)
        if override and override.ends_unix_s is not None and override.ends_unix_s <= self._unix_s():
            del self._by_class[name]
            return None
        return override

    def set(self, threshold: float, name: str | None, seconds: float | None) -> None:
        """Override the policy for one class, or for all classes if `name` is None.

        The override lasts for `seconds`, or until it is cleared if `seconds` is None. Raises `ConfigError` for an
        unknown class or a value out of range, in which case nothing changes.
        """
        class_names = self._named(name)
        ceiling = self._plan.ceiling
        for class_name in class_names:
            floor = self._plan.floor(class_name)
            if not floor <= threshold <= ceiling:
                raise ConfigError(f"threshold is {threshold}; class {class_name} allows {floor:g} to {ceiling:g}.")
        if seconds is not None and not 0 < seconds <= SECONDS_MAX:
            raise ConfigError(f"the override lasts {seconds:g} s, must be above 0 and at most {SECONDS_MAX:,}, a year.")
        override = Override(threshold, None if seconds is None else self._unix_s() + seconds)
        self._replace(self._by_class | dict.fromkeys(class_names, override))

    def clear(self, name: str | None) -> None:
        """Drop the override of one class, or of all classes if `name` is None.

        Raises `ConfigError` for an unknown class.
        """
        cleared = self._named(name)
        kept = {key: override for key, override in self._by_class.items() if key not in cleared}
        self._replace(kept)

    def _named(self, name: str | None) -> list[str]:
        if name is not None and name not in self._names:
            raise ConfigError(f"there is no class {name!r}; there are {', '.join(self._names)}.")
        return self._names if name is None else [name]

    def _replace(self, overrides: dict[str, Override]) -> None:
        if self._store:  # save first: an override that was confirmed to an operator must survive a crash
            self._store.save(_BY_CLASS.dump_json(overrides))
        self._by_class = overrides
