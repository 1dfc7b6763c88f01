"""Thresholds set by an operator, and the JSON in which they outlive the controller.

In:    a class, a threshold, for how long.
Out:   the override in force for a class.
Never: lasts beyond its end, or is outside the bounds of its class.
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
    """When it ends, as Unix time; None lasts until it is cleared."""


_BY_CLASS = TypeAdapter(dict[str, Override])


def to_json(overrides: dict[str, Override]) -> bytes:
    """Return what `from_json` reads."""
    return _BY_CLASS.dump_json(overrides)


def from_json(text: bytes) -> dict[str, Override]:
    """Return overrides by class."""
    return _BY_CLASS.validate_json(text)


class OverrideStore(Protocol):
    """Storage in which overrides outlive the controller."""

    def load(self) -> dict[str, Override]:
        """Return what was saved last."""

    def save(self, overrides: dict[str, Override]) -> None:
        """Replace what was saved."""


class NullStore:
    """An `OverrideStore` that keeps nothing."""

    def load(self) -> dict[str, Override]:
        """Return nothing."""
        return {}

    def save(self, overrides: dict[str, Override]) -> None:
        """Do nothing."""


class Overrides:
    """The overrides of all classes. Those that were stored count again if they still fit the plan."""

    def __init__(self, plan: ControlPlan, store: OverrideStore, unix_clock: Callable[[], float]) -> None:
        self._plan, self._store, self._unix_s = plan, store, unix_clock
        self._names = [each.name for each in plan.classes]
        self._by_class = {
            name: override
            for name, override in store.load().items()
            if name in self._names and plan.floor(name) <= override.threshold <= plan.ceiling
        }

    def get(self, name: str) -> Override | None:
        """Return the override of a class, if there is one."""
        return self._by_class.get(name)

    def in_force(self, name: str) -> Override | None:
        """Return the override of a class; one that has ended is dropped."""
        override = self._by_class.get(name)
        if override and override.ends_unix_s is not None and override.ends_unix_s <= self._unix_s():
            del self._by_class[name]
            return None
        return override

    def set(self, threshold: float, name: str | None, seconds: float | None) -> None:
        """Override one class or all, for some seconds or until cleared.

        Raises `ConfigError` for an unknown class or a value out of range; then nothing changes.
        """
        names = self._named(name)
        for each in names:
            floor, ceiling = self._plan.floor(each), self._plan.ceiling
            if not floor <= threshold <= ceiling:
                raise ConfigError(f"threshold is {threshold}; class {each} allows {floor:g} to {ceiling:g}.")
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ConfigError(f"the override is to last {seconds} s; give more than 0.")
        ends = None if seconds is None else self._unix_s() + seconds
        self._replace(self._by_class | {each: Override(threshold, ends) for each in names})

    def clear(self, name: str | None) -> None:
        """Drop the override of one class or of all. Raises `ConfigError` for an unknown class."""
        cleared = self._named(name)
        self._replace({each: override for each, override in self._by_class.items() if each not in cleared})

    def _named(self, name: str | None) -> list[str]:
        if name is not None and name not in self._names:
            raise ConfigError(f"there is no class {name!r}; there are {', '.join(self._names)}.")
        return self._names if name is None else [name]

    def _replace(self, overrides: dict[str, Override]) -> None:
        self._store.save(overrides)  # first: what an operator was told is set must be
        self._by_class = overrides
